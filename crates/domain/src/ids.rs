//! A typed name for each kind of thing, checked where it is made.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that breaks the rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a {what}: {rule}")]
pub struct ParseIdError {
    /// What was given.
    pub text: String,
    /// What it should have been.
    pub what: &'static str,
    /// What such a name looks like.
    pub rule: &'static str,
}

/// The longest model name: what is derived from it must still be a Kubernetes name of at most 63 characters.
pub const MODEL_NAME_CHARS_MAX: usize = 52;

fn is_dns_label(text: &str, chars_max: usize) -> bool {
    let ok = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = text.as_bytes();
    (1..=chars_max).contains(&bytes.len())
        && bytes.iter().all(|&c| ok(c) || c == b'-' || c == b'.')
        && ok(bytes[0])
        && ok(bytes[bytes.len() - 1])
}

const NAME_RULE: &str = "lower-case letters, digits, `-` and `.`, starting and ending with a letter or digit";

/// A Model, by namespace and name. Prints as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ModelName {
    /// Where it lives; `default` where nobody said.
    pub namespace: String,
    /// What it is called there.
    pub name: String,
}

impl ModelName {
    /// Checks both parts.
    pub fn new(namespace: &str, name: &str) -> Result<Self, ParseIdError> {
        if !is_dns_label(namespace, 63) {
            return Err(ParseIdError { text: namespace.into(), what: "namespace", rule: NAME_RULE });
        }
        if !is_dns_label(name, MODEL_NAME_CHARS_MAX) {
            return Err(ParseIdError {
                text: name.into(),
                what: "model name",
                rule: "at most 52 lower-case letters, digits, `-` and `.`, starting and ending with a letter or digit",
            });
        }
        Ok(ModelName { namespace: namespace.into(), name: name.into() })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A node, by the name that the cluster knows it under.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeName(String);

impl NodeName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for NodeName {
    type Err = ParseIdError;
    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        if is_dns_label(text, 253) {
            Ok(NodeName(text.into()))
        } else {
            Err(ParseIdError { text: text.into(), what: "node name", rule: NAME_RULE })
        }
    }
}

impl TryFrom<String> for NodeName {
    type Error = ParseIdError;
    fn try_from(text: String) -> Result<Self, ParseIdError> {
        text.parse()
    }
}

impl From<NodeName> for String {
    fn from(name: NodeName) -> String {
        name.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The identity of a checkpoint's bytes: `sha256:` and 64 hexadecimal digits, over its manifest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// From the 32 bytes of a SHA-256.
    pub fn from_sha256(hash: &[u8; 32]) -> Self {
        use fmt::Write as _;
        let mut text = String::with_capacity(7 + 64);
        text.push_str("sha256:");
        for byte in hash {
            let _ = write!(text, "{byte:02x}");
        }
        Digest(text)
    }

    /// As written, with its prefix.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The hexadecimal digits alone: the folder's name in a store.
    pub fn hex(&self) -> &str {
        &self.0["sha256:".len()..]
    }
}

impl FromStr for Digest {
    type Err = ParseIdError;
    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let ok = text.strip_prefix("sha256:").is_some_and(|hex| {
            hex.len() == 64 && hex.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c))
        });
        if ok {
            Ok(Digest(text.into()))
        } else {
            Err(ParseIdError {
                text: text.into(),
                what: "digest",
                rule: "`sha256:` and 64 lower-case hexadecimal digits",
            })
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = ParseIdError;
    fn try_from(text: String) -> Result<Self, ParseIdError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The generation of an order to a node: it only grows, so that an old order is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

/// A session: the `x-request-id` of its response; further choices (`n > 1`) add `.1`, `.2`, ….
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SessionId(String);

impl SessionId {
    /// As one segment of a URL's path: what is special there is escaped.
    pub fn in_path(&self) -> String {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
        self.0
            .bytes()
            .map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") })
            .collect()
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SessionId {
    type Err = ParseIdError;
    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let ok = |c: u8| c.is_ascii_graphic() && !matches!(c, b'/' | b'"' | b'\\' | b'?' | b'#' | b'%');
        if (1..=128).contains(&text.len()) && text.bytes().all(ok) {
            Ok(SessionId(text.into()))
        } else {
            Err(ParseIdError {
                text: text.chars().take(140).collect(),
                what: "session id",
                rule: "1 to 128 printable ASCII characters without blanks, quotes and / \\ ? # %",
            })
        }
    }
}

impl TryFrom<String> for SessionId {
    type Error = ParseIdError;
    fn try_from(text: String) -> Result<Self, ParseIdError> {
        text.parse()
    }
}

impl From<SessionId> for String {
    fn from(id: SessionId) -> String {
        id.0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_where_they_are_made() {
        assert!(ModelName::new("default", "qwen-7b").is_ok());
        assert!(ModelName::new("default", "llama-3.1").is_ok());
        for bad in ["", "Qwen", "-a", "a-", "a/b", &"x".repeat(53)] {
            assert!(ModelName::new("default", bad).is_err(), "{bad}");
        }
        assert!("node-1".parse::<NodeName>().is_ok());
        assert!("../etc".parse::<NodeName>().is_err());
    }

    #[test]
    fn digests_round_trip() {
        let digest = Digest::from_sha256(&[0xab; 32]);
        assert_eq!(digest.as_str().parse::<Digest>().unwrap(), digest);
        assert_eq!(digest.hex().len(), 64);
        assert!("sha256:xyz".parse::<Digest>().is_err());
    }

    #[test]
    fn session_ids_are_safe_in_paths_and_headers() {
        assert!("req-1.2".parse::<SessionId>().is_ok());
        for bad in ["", "a b", "a/b", "a\nb", "é", &"x".repeat(129)] {
            assert!(bad.parse::<SessionId>().is_err(), "{bad}");
        }
    }
}
