//! Identities, parsed once at the edge.
//!
//! Invariant: a value of these types is well formed wherever it appears, so file names, labels and log lines
//! can be made from it without another check.

use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The longest deployment name: an RFC 1123 label has 63 characters, of which instances need `-63` and
/// Kubernetes some room for its own suffixes.
pub const NAME_LIMIT: usize = 52;

/// The most replicas of one deployment.
pub const REPLICA_LIMIT: u32 = 64;

/// Why a text is no name, port or id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Not an RFC 1123 label.
    #[error(
        "`{0}` is not a name: use lower-case letters, digits and `-`, beginning and ending with a letter or digit"
    )]
    NotALabel(String),
    /// Longer than [`NAME_LIMIT`].
    #[error("the name `{0}` has {1} characters, and {NAME_LIMIT} are the most")]
    TooLong(String, usize),
    /// No `-ORDINAL` at the end.
    #[error("`{0}` is not an instance: its name ends in `-0`, `-1` and so on")]
    NotAnInstance(String),
    /// Not a launch id.
    #[error("`{0}` is not a launch id (a UUID)")]
    NotALaunchId(String),
    /// Port 0.
    #[error("a port is a number from 1 to 65535")]
    NotAPort,
    /// An empty device id, or one that could not stand in a list.
    #[error("`{0}` is not a device id: no spaces, commas or control characters")]
    NotADevice(String),
}

/// What a manifest calls its deployment: an RFC 1123 label of at most [`NAME_LIMIT`] characters.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeploymentName(String);

impl DeploymentName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The instance of this deployment with the given ordinal.
    pub fn instance(&self, ordinal: u32) -> InstanceName {
        InstanceName {
            deployment: self.clone(),
            ordinal,
        }
    }
}

fn is_label(text: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    match (bytes.first(), bytes.last()) {
        (Some(&first), Some(&last)) => {
            alphanumeric(first)
                && alphanumeric(last)
                && bytes.iter().all(|&b| alphanumeric(b) || b == b'-')
        }
        _ => false,
    }
}

impl FromStr for DeploymentName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if !is_label(text) {
            return Err(NameError::NotALabel(text.to_owned()));
        }
        if text.len() > NAME_LIMIT {
            return Err(NameError::TooLong(text.to_owned(), text.len()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for DeploymentName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<DeploymentName> for String {
    fn from(name: DeploymentName) -> Self {
        name.0
    }
}

impl fmt::Display for DeploymentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl JsonSchema for DeploymentName {
    fn schema_name() -> Cow<'static, str> {
        "DeploymentName".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
            "maxLength": NAME_LIMIT,
        })
    }
}

/// One running copy of a deployment: `NAME-ORDINAL`. No two deployments share an instance name, because the
/// ordinal is what follows the last `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InstanceName {
    /// The deployment it belongs to.
    pub deployment: DeploymentName,
    /// Which copy, from 0.
    pub ordinal: u32,
}

impl FromStr for InstanceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let not_an_instance = || NameError::NotAnInstance(text.to_owned());
        let (deployment, digits) = text.rsplit_once('-').ok_or_else(not_an_instance)?;
        let ordinal: u32 = digits.parse().map_err(|_| not_an_instance())?;
        // `+1`, `01` and the like would give one instance two spellings, and so two record files.
        if ordinal.to_string() != digits {
            return Err(not_an_instance());
        }
        Ok(Self {
            deployment: deployment.parse()?,
            ordinal,
        })
    }
}

impl TryFrom<String> for InstanceName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<InstanceName> for String {
    fn from(name: InstanceName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for InstanceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}-{}", self.deployment, self.ordinal))
    }
}

/// A UUID per launch attempt: proof that a process or container is ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LaunchId(Uuid);

impl LaunchId {
    /// The id of the launch of `instance` planned under `nonce`. Derived, so that the plan stays a function of
    /// its arguments; unguessable and unique, because a nonce is random and used for one pass.
    pub fn derive(nonce: Uuid, instance: &InstanceName) -> Self {
        Self(Uuid::new_v5(&nonce, instance.to_string().as_bytes()))
    }

    /// The id's bytes, for what is derived from it (jitter).
    pub fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }
}

impl FromStr for LaunchId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Uuid::parse_str(text)
            .map(Self)
            .map_err(|_| NameError::NotALaunchId(text.to_owned()))
    }
}

impl fmt::Display for LaunchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A device's identity: its UUID, else its PCI bus id, never an index.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceId(String);

impl DeviceId {
    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DeviceId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let unfit = |c: char| c.is_whitespace() || c.is_control() || c == ',';
        if text.is_empty() || text.contains(unfit) {
            return Err(NameError::NotADevice(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for DeviceId {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        text.parse()
    }
}

impl From<DeviceId> for String {
    fn from(id: DeviceId) -> Self {
        id.0
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl JsonSchema for DeviceId {
    fn schema_name() -> Cow<'static, str> {
        "DeviceId".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "minLength": 1 })
    }
}

/// A TCP port, 1 to 65535.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Port(NonZeroU16);

impl Port {
    /// The number.
    pub fn get(self) -> u16 {
        self.0.get()
    }

    /// The ports from this one upward, this one first.
    pub fn upward(self) -> impl Iterator<Item = Self> {
        (self.get()..=u16::MAX)
            .filter_map(NonZeroU16::new)
            .map(Self)
    }
}

impl TryFrom<u16> for Port {
    type Error = NameError;

    fn try_from(number: u16) -> Result<Self, NameError> {
        NonZeroU16::new(number).map(Self).ok_or(NameError::NotAPort)
    }
}

impl From<Port> for u16 {
    fn from(port: Port) -> Self {
        port.get()
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl JsonSchema for Port {
    fn schema_name() -> Cow<'static, str> {
        "Port".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "minimum": 1, "maximum": 65535 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deployment_name_is_an_rfc_1123_label() {
        for good in ["a", "qwen3-8b", "0", &"a".repeat(NAME_LIMIT)] {
            assert_eq!(good.parse::<DeploymentName>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            "-a",
            "a-",
            "A",
            "a_b",
            "a.b",
            "ä",
            "a/b",
            "..",
            &"a".repeat(NAME_LIMIT + 1),
        ] {
            assert!(bad.parse::<DeploymentName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_instance_name_has_one_spelling() {
        let name: InstanceName = "a-0-12".parse().unwrap();
        assert_eq!((name.deployment.as_str(), name.ordinal), ("a-0", 12));
        assert_eq!(name.to_string(), "a-0-12");
        for bad in ["a", "a-", "-0", "a-01", "a-+1", "a--1", "a-4294967296"] {
            assert!(bad.parse::<InstanceName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_launch_id_depends_on_nonce_and_instance_alone() {
        let name: InstanceName = "a-0".parse().unwrap();
        let nonce = Uuid::from_u128(1);
        assert_eq!(
            LaunchId::derive(nonce, &name),
            LaunchId::derive(nonce, &name)
        );
        assert_ne!(
            LaunchId::derive(nonce, &name),
            LaunchId::derive(Uuid::from_u128(2), &name)
        );
    }
}
