//! `evenkeel schema`: the JSON schema of the manifest, made from its types.
//!
//! Invariant: what is printed is what the parser takes; a test compares it with the file that editors use.

use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use crate::manifest::Manifest;

/// Where editors find the schema once it is published; until then it only identifies it.
const ID: &str = "https://evenkeel.dev/schemas/modeldeployment.v1alpha1.json";

/// The JSON schema (draft 2020-12) of a manifest as pretty JSON with a trailing newline.
pub fn schema() -> String {
    let mut schema = SchemaSettings::draft2020_12()
        .into_generator()
        .into_root_schema_for::<Manifest>();
    schema.insert("$id".to_owned(), json!(ID));
    let ordered = identity_first(schema.to_value());
    let mut text = serde_json::to_string_pretty(&ordered).expect("a JSON value has text keys only");
    text.push('\n');
    text
}

/// `$schema` and `$id` stand first: readers and editors look there.
fn identity_first(schema: Value) -> Value {
    let Value::Object(mut members) = schema else {
        return schema;
    };
    let mut ordered = serde_json::Map::new();
    for key in ["$schema", "$id", "title"] {
        if let Some(member) = members.shift_remove(key) {
            ordered.insert(key.to_owned(), member);
        }
    }
    ordered.extend(members);
    Value::Object(ordered)
}
