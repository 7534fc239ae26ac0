//! Merging arguments: what evenkeel would pass, and what the manifest's `spec.args` say instead.
//!
//! Invariant: what the user wrote is passed as written and last; nothing of it is dropped or reordered.

/// One of our own arguments: a flag with its value, or a positional argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Argument {
    /// A positional argument or sub-command.
    Positional(String),
    /// A flag, in its long form, and its value where it has one.
    Flag(&'static str, Option<String>),
}

impl Argument {
    /// A flag with a value.
    pub fn value(flag: &'static str, value: impl Into<String>) -> Self {
        Self::Flag(flag, Some(value.into()))
    }

    /// A flag without a value.
    pub fn switch(flag: &'static str) -> Self {
        Self::Flag(flag, None)
    }
}

/// Other spellings of a flag: the long form, and what else an engine takes for it.
pub type Aliases = &'static [(&'static str, &'static [&'static str])];

/// Our arguments without those that the user's repeat, then the user's.
pub fn merge(ours: Vec<Argument>, users: &[String], aliases: Aliases) -> Vec<String> {
    let repeated: Vec<String> = users
        .iter()
        .filter(|text| is_flag(text))
        .map(|text| canonical(text, aliases))
        .collect();
    let mut merged = Vec::with_capacity(ours.len() * 2 + users.len());
    for argument in ours {
        match argument {
            Argument::Positional(text) => merged.push(text),
            Argument::Flag(flag, _) if repeated.contains(&canonical(flag, aliases)) => {}
            Argument::Flag(flag, value) => {
                merged.push(flag.to_owned());
                merged.extend(value);
            }
        }
    }
    merged.extend(users.iter().cloned());
    merged
}

/// Whether an argument is a flag rather than a value: `-1` and `-0.5` are values.
fn is_flag(text: &str) -> bool {
    text.len() > 1 && text.starts_with('-') && text.parse::<f64>().is_err()
}

/// The one spelling of a flag: without `=value`, with dashes, without `no-`, in its long form.
fn canonical(text: &str, aliases: Aliases) -> String {
    let name = text.split('=').next().unwrap_or(text);
    let name = if name.starts_with("--") {
        name.replace('_', "-")
    } else {
        name.to_owned()
    };
    let name = match name.strip_prefix("--no-") {
        Some(positive) => format!("--{positive}"),
        None => name,
    };
    aliases
        .iter()
        .find(|(_, others)| others.contains(&name.as_str()))
        .map_or(name, |(long, _)| (*long).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIASES: Aliases = &[("--ctx-size", &["-c"]), ("--parallel", &["-np"])];

    fn merged(users: &[&str]) -> String {
        let ours = vec![
            Argument::Positional("serve".into()),
            Argument::value("--ctx-size", "4096"),
            Argument::value("--parallel", "2"),
            Argument::switch("--jinja"),
        ];
        let users: Vec<String> = users.iter().map(|&text| text.to_owned()).collect();
        merge(ours, &users, ALIASES).join(" ")
    }

    #[test]
    fn without_repetition_the_users_come_last() {
        assert_eq!(
            merged(&["--verbose", "-1"]),
            "serve --ctx-size 4096 --parallel 2 --jinja --verbose -1"
        );
    }

    #[test]
    fn a_repeated_flag_goes_with_its_value() {
        for again in ["-c", "--ctx-size", "--ctx_size"] {
            assert_eq!(
                merged(&[again, "1"]),
                format!("serve --parallel 2 --jinja {again} 1")
            );
        }
        assert_eq!(
            merged(&["--ctx-size=1"]),
            "serve --parallel 2 --jinja --ctx-size=1"
        );
    }

    #[test]
    fn a_negated_flag_counts_as_the_flag() {
        assert_eq!(
            merged(&["--no-jinja"]),
            "serve --ctx-size 4096 --parallel 2 --no-jinja"
        );
    }

    #[test]
    fn a_negative_number_is_a_value() {
        assert_eq!(
            merged(&["--seed", "-1", "-0.5"]),
            "serve --ctx-size 4096 --parallel 2 --jinja --seed -1 -0.5"
        );
    }
}
