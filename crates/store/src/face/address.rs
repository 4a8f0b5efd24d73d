//! What a request is about: its path and query, read strictly.

use crate::{Filter, Kind, ObjectRef, StoreError, Version};

/// What a path points to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// All objects of a kind, of one namespace or of all.
    Collection { kind: Kind, namespace: Option<String> },
    /// One object.
    Object(ObjectRef),
    /// Its status.
    Status(ObjectRef),
    /// One of the documents that tell a client what there is.
    Discovery(String),
    /// The namespaces, or one of them.
    Namespaces(Option<String>),
}

impl Address {
    /// Reads a path; none if there is nothing at it.
    pub(super) fn read(path: &str) -> Option<Address> {
        let parts: Vec<String> = path.split('/').skip(1).map(decode).collect::<Option<_>>()?;
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return Some(Address::Discovery(path.to_owned())),
        };
        if rest.is_empty() {
            return Some(Address::Discovery(path.to_owned()));
        }
        if let ("", "v1", ["namespaces", name @ ..]) = (group, version, rest)
            && name.len() < 2
        {
            return Some(Address::Namespaces(name.first().map(|&name| name.to_owned())));
        }
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] => (Some(*namespace), rest),
            rest => (None, rest),
        };
        let (plural, rest) = rest.split_first()?;
        let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| kind.plural() == *plural && kind.api_version() == api_version)?;
        if namespace.is_some() && (!kind.namespaced() || namespace == Some("")) {
            return None;
        }
        // One object of a kind with namespaces is found in its namespace only.
        let object = |name: &str| {
            let found = namespace.is_some() == kind.namespaced() && !name.is_empty();
            found.then(|| ObjectRef::new(kind, namespace.unwrap_or_default(), name))
        };
        match rest {
            [] => Some(Address::Collection { kind, namespace: namespace.map(str::to_owned) }),
            [name] => object(name).map(Address::Object),
            [name, "status"] if kind.has_status() => object(name).map(Address::Status),
            _ => None,
        }
    }
}

/// A query, as far as it is understood; what is not is ignored, as API servers do.
#[derive(Clone, Debug, Default)]
pub(super) struct Query {
    pairs: Vec<(String, String)>,
}

impl Query {
    pub(super) fn read(text: &str) -> Result<Query, StoreError> {
        let pairs = text.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((decode(&key.replace('+', " "))?, decode(&value.replace('+', " "))?))
        });
        let wrong =
            || StoreError::BadRequest { message: format!("the query `{text}` is not percent-encoded text") };
        Ok(Query { pairs: pairs.collect::<Option<_>>().ok_or_else(wrong)? })
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.pairs
            .iter()
            .find(|(name, value)| name == key && !value.is_empty())
            .map(|(_, value)| value.as_str())
    }

    pub(super) fn is_set(&self, key: &str) -> bool {
        matches!(self.get(key), Some("true" | "1" | "True"))
    }

    pub(super) fn dry_run(&self) -> bool {
        self.get("dryRun").is_some()
    }

    /// None: from what is there now.
    pub(super) fn version(&self) -> Option<Version> {
        self.get("resourceVersion").filter(|text| *text != "0").map(|text| Version(text.to_owned()))
    }

    pub(super) fn filter(&self, namespace: Option<String>) -> Result<Filter, StoreError> {
        let fields = equalities("fieldSelector", self.get("fieldSelector"))?;
        let labels = equalities("labelSelector", self.get("labelSelector"))?;
        Ok(Filter { namespace, fields: fields.into_iter().collect(), labels: labels.into_iter().collect() })
    }
}

/// `a=b,c==d`.
fn equalities(name: &str, selector: Option<&str>) -> Result<Vec<(String, String)>, StoreError> {
    let wrong = |part: &str| StoreError::BadRequest {
        message: format!("{name} `{part}` is not supported here: only `key=value`, joined by commas, is"),
    };
    let read = |part: &str| {
        let (key, value) =
            part.split_once("==").or_else(|| part.split_once('=')).ok_or_else(|| wrong(part))?;
        let odd = |text: &str| text.contains(['!', '=', '(', ')', ' ']);
        if key.is_empty() || odd(key) || odd(value) {
            Err(wrong(part))
        } else {
            Ok((key.into(), value.into()))
        }
    };
    selector.into_iter().flat_map(|selector| selector.split(',')).map(|part| read(part.trim())).collect()
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
                u8::try_from(digit(rest.next())? * 16 + digit(rest.next())?).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read() {
        let check = |path: &str, expect: Option<Address>| assert_eq!(Address::read(path), expect, "{path}");
        let object = |kind, namespace, name| Some(Address::Object(ObjectRef::new(kind, namespace, name)));
        check("/apis/pilotlight.dev/v1alpha1/namespaces/a/models/x", object(Kind::Model, "a", "x"));
        check("/apis/pilotlight.dev/v1alpha1/modelnodes/x", object(Kind::ModelNode, "", "x"));
        check("/api/v1/namespaces/a/events/x%20y", object(Kind::Event, "a", "x y"));
        let status = Address::Status(ObjectRef::new(Kind::ModelReplica, "a", "x"));
        check("/apis/pilotlight.dev/v1alpha1/namespaces/a/modelreplicas/x/status", Some(status));
        let all = Address::Collection { kind: Kind::Lease, namespace: None };
        check("/apis/coordination.k8s.io/v1/leases", Some(all));
        check("/api/v1/namespaces", Some(Address::Namespaces(None)));
        check("/api/v1/namespaces/a", Some(Address::Namespaces(Some("a".into()))));
        check(
            "/apis/pilotlight.dev/v1alpha1",
            Some(Address::Discovery("/apis/pilotlight.dev/v1alpha1".into())),
        );
        for nothing in [
            "/apis/pilotlight.dev/v1alpha1/models/x",
            "/apis/pilotlight.dev/v1alpha1/namespaces/a/modelnodes/x",
            "/apis/pilotlight.dev/v1/namespaces/a/models",
            "/apis/pilotlight.dev/v1alpha1/namespaces/a/models/",
            "/apis/pilotlight.dev/v1alpha1/namespaces//models/x",
            "/apis/pilotlight.dev/v1alpha1/namespaces/a/models/x/scale",
            "/apis/coordination.k8s.io/v1/namespaces/a/leases/x/status",
            "/api/v1/pods",
            "/api/v1/namespaces/a/events/%ff",
            "/api/v1/namespaces/a/events/%+1",
        ] {
            check(nothing, None);
        }
    }

    #[test]
    fn queries_are_read() {
        let query =
            Query::read("watch=1&fieldSelector=spec.nodeName%3Dn1,metadata.name==m&labelSelector=a=b")
                .unwrap();
        assert!(query.is_set("watch") && !query.is_set("pretty"));
        let filter = query.filter(None).unwrap();
        assert_eq!(filter.field_selector(), "metadata.name=m,spec.nodeName=n1");
        assert_eq!(filter.label_selector(), "a=b");
        assert!(Query::read("a=%zz").is_err());
        for bad in ["a!=b", "a in (b)", "a", "=b"] {
            assert!(equalities("labelSelector", Some(bad)).is_err(), "{bad}");
        }
        assert_eq!(Query::read("resourceVersion=0").unwrap().version(), None);
    }
}
