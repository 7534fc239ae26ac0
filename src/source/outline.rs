//! The shape of a YAML document: keys, values and their numbers, without types.
//!
//! The parser tells where something stands only in an error. So every key and value gets a number in the order in
//! which they are met, and whoever wants to know the place of one walks the document again and fails there.
//!
//! Invariant: two walks over the same text number everything the same way, and no walk visits more than
//! [`NODE_LIMIT`] keys and values, aliases followed.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};

use serde::de::{self, DeserializeSeed, EnumAccess, IgnoredAny, MapAccess, SeqAccess};
use serde::de::{VariantAccess, Visitor};
use serde_yaml::{Deserializer, Error, Location};

/// The most keys and values of a file once aliases are followed: nearly twice what 1 MiB of small manifests holds.
const NODE_LIMIT: usize = 200_000;

/// The most text of a file in bytes once aliases are followed: aliases may quadruple the largest file.
const TEXT_LIMIT: usize = 4 << 20;

/// Longer texts are not kept: what is looked up here (`apiVersion`, names) is short.
const KEPT_TEXT: usize = 256;

/// A value.
#[derive(Debug, PartialEq)]
pub(super) struct Node {
    /// Its number.
    pub(super) number: usize,
    /// What it holds.
    pub(super) shape: Shape,
}

/// What a value holds.
#[derive(Debug, PartialEq)]
pub(super) enum Shape {
    /// Nothing, or `null`.
    Null,
    /// A text, number or truth value; its text unless long.
    Scalar(Option<String>),
    /// A list.
    Sequence(Vec<Node>),
    /// A mapping, in the order written, doubled keys included.
    Mapping(Vec<Entry>),
}

/// A key and its value.
#[derive(Debug, PartialEq)]
pub(super) struct Entry {
    /// The key's text.
    pub(super) key: String,
    /// The key's number.
    pub(super) key_number: usize,
    /// Its value.
    pub(super) value: Node,
}

impl Node {
    /// The first value under a key.
    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        match &self.shape {
            Shape::Mapping(entries) => entries.iter().find(|entry| entry.key == key),
            Shape::Null | Shape::Scalar(_) | Shape::Sequence(_) => None,
        }
    }

    /// The value at a path such as `spec.env[0]`.
    pub(super) fn at(&self, path: &str) -> Option<&Self> {
        steps(path).try_fold(self, |node, step| match (step, &node.shape) {
            (Step::Key(name), _) => node.get(name).map(|entry| &entry.value),
            (Step::Index(n), Shape::Sequence(items)) => items.get(n),
            (Step::Index(_), _) => None,
        })
    }

    /// Its text, if it has a short one.
    pub(super) fn text(&self) -> Option<&str> {
        match &self.shape {
            Shape::Scalar(text) => text.as_deref(),
            Shape::Null | Shape::Sequence(_) | Shape::Mapping(_) => None,
        }
    }

    /// The number of what a person should look at for a path such as `spec.env[0].name`: the value if it is a scalar,
    /// its key if it holds more or nothing, and the nearest parent's key if there is no such value.
    pub(super) fn number_at(&self, path: &str) -> usize {
        let mut node = self;
        let mut key = None;
        for step in steps(path) {
            let below = match (step, &node.shape) {
                (Step::Key(name), _) => node
                    .get(name)
                    .map(|entry| (Some(entry.key_number), &entry.value)),
                (Step::Index(n), Shape::Sequence(items)) => items.get(n).map(|item| (None, item)),
                (Step::Index(_), _) => None,
            };
            let Some((below_key, below)) = below else {
                return key.unwrap_or(node.number);
            };
            (key, node) = (below_key, below);
        }
        match node.shape {
            Shape::Scalar(_) => node.number,
            Shape::Null | Shape::Sequence(_) | Shape::Mapping(_) => key.unwrap_or(node.number),
        }
    }

    /// Splits a message of the parser, `spec.env[0].name: what is wrong`, into path and rest. The keys of this
    /// document tell where the path ends, whatever characters they hold.
    pub(super) fn split_path<'m>(&self, message: &'m str) -> (&'m str, &'m str) {
        let mut node = self;
        let mut rest = message;
        loop {
            let position = message.len() - rest.len();
            if position > 0
                && let Some(end) = rest.strip_prefix(": ")
            {
                return (&message[..position], end);
            }
            let below = match &node.shape {
                Shape::Mapping(entries) => {
                    let name = if position == 0 {
                        Some(rest)
                    } else {
                        rest.strip_prefix('.')
                    };
                    name.and_then(|name| {
                        entries
                            .iter()
                            .filter_map(|entry| {
                                Some((name.strip_prefix(entry.key.as_str())?, &entry.value))
                            })
                            .filter(|(tail, _)| {
                                tail.starts_with(['.', '[']) || tail.starts_with(": ")
                            })
                            .min_by_key(|(tail, _)| tail.len())
                    })
                }
                Shape::Sequence(items) => items.iter().enumerate().find_map(|(n, item)| {
                    Some((rest.strip_prefix(format!("[{n}]").as_str())?, item))
                }),
                Shape::Null | Shape::Scalar(_) => None,
            };
            match below {
                Some((tail, below)) => (rest, node) = (tail, below),
                None => return ("", message),
            }
        }
    }

    /// The paths and numbers of keys that stand twice in one mapping.
    pub(super) fn doubled_keys(&self) -> Vec<(String, usize)> {
        let mut doubled = Vec::new();
        self.collect_doubled(&mut String::new(), &mut doubled);
        doubled
    }

    fn collect_doubled(&self, path: &mut String, doubled: &mut Vec<(String, usize)>) {
        let before = path.len();
        match &self.shape {
            Shape::Null | Shape::Scalar(_) => {}
            Shape::Sequence(items) => {
                for (n, item) in items.iter().enumerate() {
                    // Writing to a String cannot fail.
                    let _ = write!(path, "[{n}]");
                    item.collect_doubled(path, doubled);
                    path.truncate(before);
                }
            }
            Shape::Mapping(entries) => {
                let mut seen = BTreeSet::new();
                for entry in entries {
                    if !path.is_empty() {
                        path.push('.');
                    }
                    path.push_str(&entry.key);
                    if !seen.insert(&entry.key) {
                        doubled.push((path.clone(), entry.key_number));
                    }
                    entry.value.collect_doubled(path, doubled);
                    path.truncate(before);
                }
            }
        }
    }
}

enum Step<'p> {
    Key(&'p str),
    Index(usize),
}

fn steps(path: &str) -> impl Iterator<Item = Step<'_>> {
    path.split(['.', '['])
        .filter(|step| !step.is_empty())
        .map(|step| {
            match step
                .strip_suffix(']')
                .and_then(|digits| digits.parse().ok())
            {
                Some(n) => Step::Index(n),
                None => Step::Key(step),
            }
        })
}

/// How much of a file has been walked, and where to stop.
#[derive(Debug)]
pub(super) struct Walk {
    next: usize,
    nodes_left: usize,
    text_left: usize,
    stop_at: Option<usize>,
    stopped: Option<Stop>,
}

/// Why a walk stopped by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Found,
    TooManyNodes,
    TooMuchText,
}

impl Walk {
    /// A walk over a file.
    pub(super) fn new() -> Self {
        Self {
            next: 0,
            nodes_left: NODE_LIMIT,
            text_left: TEXT_LIMIT,
            stop_at: None,
            stopped: None,
        }
    }

    /// The shape of the next document.
    pub(super) fn outline(&mut self, document: Deserializer<'_>) -> Result<Node, Error> {
        self.next = 0;
        NodeSeed(self).deserialize(document)
    }

    /// What was too much, where that is why the walk failed.
    pub(super) fn excess(&self) -> Option<String> {
        match self.stopped? {
            Stop::Found => None,
            Stop::TooManyNodes => Some(format!(
                "has more than {NODE_LIMIT} values once its aliases are followed"
            )),
            Stop::TooMuchText => {
                let limit = TEXT_LIMIT >> 20;
                Some(format!(
                    "has more than {limit} MiB of text once its aliases are followed"
                ))
            }
        }
    }

    /// Counts a key or value, and fails at the one that is looked for.
    fn number<E: de::Error>(&mut self, text: usize) -> Result<usize, E> {
        let number = self.next;
        let stop = match (
            self.nodes_left.checked_sub(1),
            self.text_left.checked_sub(text),
        ) {
            _ if self.stop_at == Some(number) => Stop::Found,
            (Some(nodes_left), Some(text_left)) => {
                (self.next, self.nodes_left, self.text_left) = (number + 1, nodes_left, text_left);
                return Ok(number);
            }
            (None, _) => Stop::TooManyNodes,
            (_, None) => Stop::TooMuchText,
        };
        self.stopped = Some(stop);
        // The parser adds the place; what was the matter is told by `stopped`.
        Err(E::custom(""))
    }
}

/// Where the key or value with a number stands in a document.
pub(super) fn locate(document: Deserializer<'_>, number: usize) -> Option<Location> {
    let mut walk = Walk {
        stop_at: Some(number),
        ..Walk::new()
    };
    let error = NodeSeed(&mut walk).deserialize(document).err()?;
    (walk.stopped == Some(Stop::Found)).then(|| error.location())?
}

struct NodeSeed<'w>(&'w mut Walk);

impl<'de> DeserializeSeed<'de> for NodeSeed<'_> {
    type Value = Node;

    fn deserialize<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(NodeVisitor(self.0))
    }
}

struct NodeVisitor<'w>(&'w mut Walk);

impl NodeVisitor<'_> {
    fn scalar<E: de::Error>(self, text: &str) -> Result<Node, E> {
        Ok(Node {
            number: self.0.number(text.len())?,
            shape: Shape::Scalar((text.len() <= KEPT_TEXT).then(|| text.to_owned())),
        })
    }

    fn null<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node {
            number: self.0.number(0)?,
            shape: Shape::Null,
        })
    }
}

impl<'de> Visitor<'de> for NodeVisitor<'_> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Node, E> {
        self.scalar(&value.to_string())
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Node, E> {
        self.scalar(&value.to_string())
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Node, E> {
        self.scalar(&value.to_string())
    }

    fn visit_i128<E: de::Error>(self, value: i128) -> Result<Node, E> {
        self.scalar(&value.to_string())
    }

    fn visit_u128<E: de::Error>(self, value: u128) -> Result<Node, E> {
        self.scalar(&value.to_string())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Node, E> {
        self.scalar(&value.to_string())
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Node, E> {
        self.scalar(value)
    }

    fn visit_none<E: de::Error>(self) -> Result<Node, E> {
        self.null()
    }

    fn visit_unit<E: de::Error>(self) -> Result<Node, E> {
        self.null()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let number = self.0.number(0)?;
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(NodeSeed(self.0))? {
            items.push(item);
        }
        Ok(Node {
            number,
            shape: Shape::Sequence(items),
        })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        let number = self.0.number(0)?;
        let mut entries = Vec::new();
        while let Some((key_number, key)) = access.next_key_seed(KeySeed(self.0))? {
            let value = access.next_value_seed(NodeSeed(self.0))?;
            entries.push(Entry {
                key,
                key_number,
                value,
            });
        }
        Ok(Node {
            number,
            shape: Shape::Mapping(entries),
        })
    }

    /// A tag, such as `!Ref`: other programs' documents have them, and what they mean is not our business.
    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<Node, A::Error> {
        let (IgnoredAny, tagged) = access.variant()?;
        tagged.newtype_variant_seed(NodeSeed(self.0))
    }
}

/// Keys are taken by their text, as the typed reading takes them: `1` and `"1"` are one key.
struct KeySeed<'w>(&'w mut Walk);

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = (usize, String);

    fn deserialize<D: de::Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = (usize, String);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text as key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<Self::Value, E> {
        Ok((self.0.number(key.len())?, key.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outline(text: &str) -> Result<Node, Error> {
        Walk::new().outline(Deserializer::from_str(text))
    }

    fn excess(text: &str) -> String {
        let mut walk = Walk::new();
        walk.outline(Deserializer::from_str(text)).unwrap_err();
        walk.excess().unwrap()
    }

    fn place(text: &str, path: &str) -> (usize, usize) {
        let number = outline(text).unwrap().number_at(path);
        let at = locate(Deserializer::from_str(text), number).unwrap();
        (at.line(), at.column())
    }

    #[test]
    fn a_path_is_found_where_it_stands_or_at_its_nearest_parent() {
        let text = "metadata:\n  name: a\nspec:\n  env:\n    - name: X\n      value: '1'\n  docker: {}\n  empty:\n";
        assert_eq!(place(text, "metadata.name"), (2, 9));
        assert_eq!(place(text, "spec.env[0].name"), (5, 13));
        assert_eq!(place(text, "spec.env[0].valueFrom.file"), (5, 7));
        assert_eq!(place(text, "spec.env[7].name"), (4, 3));
        assert_eq!(place(text, "spec.docker"), (7, 3));
        assert_eq!(place(text, "spec.empty"), (8, 3));
        assert_eq!(place(text, "spec.model.path"), (3, 1));
        assert_eq!(place(text, "kind"), (1, 1));
    }

    #[test]
    fn the_path_of_a_message_ends_where_the_documents_keys_say() {
        let node = outline("a:\n  'b: c.d': [x]\n  b: 1\n").unwrap();
        assert_eq!(
            node.split_path("a.b: c.d[0]: wrong: x"),
            ("a.b: c.d[0]", "wrong: x")
        );
        assert_eq!(node.split_path("a.b: wrong"), ("a.b", "wrong"));
        assert_eq!(
            node.split_path("unknown field `a: b`"),
            ("", "unknown field `a: b`")
        );
    }

    #[test]
    fn doubled_keys_are_found_in_every_mapping() {
        let node = outline("a: {x: 1, 'x': 2}\nb:\n  - {1: a, '1': b}\na: 3\n").unwrap();
        let doubled: Vec<_> = node
            .doubled_keys()
            .into_iter()
            .map(|(path, _)| path)
            .collect();
        assert_eq!(doubled, ["a.x", "b[0].1", "a"]);
    }

    #[test]
    fn aliases_are_followed_as_far_as_the_limits_go() {
        let same = outline("a: &a [1, 2]\nb: *a\n").unwrap();
        assert!(
            matches!(&same.get("b").unwrap().value.shape, Shape::Sequence(items) if items.len() == 2)
        );

        let wide = format!(
            "a: &a [{}]\nb: [{}]\n",
            "x,".repeat(1000),
            "*a,".repeat(1000)
        );
        assert!(excess(&wide).contains("values"));

        let long = format!(
            "a: &a '{}'\nb: [{}]\n",
            "x".repeat(100_000),
            "*a,".repeat(1000)
        );
        assert!(excess(&long).contains("MiB of text"));

        assert!(outline("&a [*a, *a]").is_err());
        assert!(outline("a: *nowhere").is_err());
    }
}
