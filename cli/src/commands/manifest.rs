//! Manifests: YAML or JSON, one or more documents, Lists taken apart.

use std::io::Read as _;

use pilotlight_store::Kind;
use serde::Deserialize as _;
use serde_json::Value;

use crate::failure::Failure;

/// A manifest is written by people: more is a mistake.
const BYTES_MAX: u64 = 16 << 20;

/// One object to be applied or deleted.
#[derive(Debug)]
pub(crate) struct Document {
    /// What it is.
    pub(crate) kind: Kind,
    /// The object, with its namespace filled in.
    pub(crate) object: Value,
}

/// Reads a file, or standard input for `-`, and checks every document before anything is done with one.
pub(crate) fn read(file: &str, namespace: &str) -> Result<Vec<Document>, Failure> {
    let text =
        if file == "-" { read_limited(std::io::stdin().lock()) } else { open(file).and_then(read_limited) };
    let text = text.map_err(|e| {
        Failure::new(format!("read the manifest {file}: {e}"))
            .cure("name a YAML or JSON file with -f, or - for standard input")
    })?;
    parse(file, &text, namespace)
}

fn open(file: &str) -> std::io::Result<std::fs::File> {
    std::fs::File::open(file)
}

fn read_limited(from: impl std::io::Read) -> std::io::Result<String> {
    let mut text = String::new();
    from.take(BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > BYTES_MAX {
        return Err(std::io::Error::other("it is larger than 16 MiB"));
    }
    Ok(text)
}

fn parse(file: &str, text: &str, namespace: &str) -> Result<Vec<Document>, Failure> {
    let mut documents = Vec::new();
    for (index, document) in serde_yaml::Deserializer::from_str(text).enumerate() {
        let place = format!("{file}, document {}", index + 1);
        let value = Value::deserialize(document)
            .map_err(|e| Failure::new(format!("{place} is neither YAML nor JSON: {e}")))?;
        match value {
            Value::Null => {}
            list if list["kind"] == "List" => {
                for item in list["items"].as_array().into_iter().flatten() {
                    documents.push(checked(&place, item.clone(), namespace)?);
                }
            }
            object => documents.push(checked(&place, object, namespace)?),
        }
    }
    if documents.is_empty() {
        return Err(Failure::new(format!("{file} holds no object"))
            .cure("a Model needs apiVersion, kind, metadata.name and spec.source.uri"));
    }
    Ok(documents)
}

fn checked(place: &str, mut object: Value, namespace: &str) -> Result<Document, Failure> {
    let field = |path: &str, value: &Value| {
        value.as_str().map(str::to_owned).ok_or_else(|| {
            Failure::new(format!("{place}: {path} is missing"))
                .cure("an object needs apiVersion, kind and metadata.name, for example `apiVersion: pilotlight.dev/v1alpha1`")
        })
    };
    let (version, kind) = (field("apiVersion", &object["apiVersion"])?, field("kind", &object["kind"])?);
    field("metadata.name", &object["metadata"]["name"])?;
    let kind = match Kind::of(&version, &kind) {
        Some(kind @ (Kind::Model | Kind::ModelNode)) => kind,
        _ => {
            return Err(Failure::new(format!("{place}: no kind {kind} of {version} can be applied here"))
                .cure("kinds are Model and ModelNode of pilotlight.dev/v1alpha1"));
        }
    };
    if kind.namespaced() && object["metadata"]["namespace"].is_null() {
        object["metadata"]["namespace"] = namespace.into();
    }
    Ok(Document { kind, object })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: &str = "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: a}\n";

    #[test]
    fn documents_and_lists_are_taken_apart() {
        let text = format!(
            "{MODEL}---\n---\n{{\"kind\": \"List\", \"items\": [{{\"apiVersion\": \"pilotlight.dev/v1alpha1\", \"kind\": \"ModelNode\", \"metadata\": {{\"name\": \"n\"}}}}]}}\n"
        );
        let documents = parse("f", &text, "team").unwrap();
        assert_eq!(documents.len(), 2);
        assert_eq!(documents[0].object["metadata"]["namespace"], "team");
        assert_eq!(documents[1].kind, Kind::ModelNode);
        assert!(documents[1].object["metadata"]["namespace"].is_null());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (text, words) in [
            ("", "holds no object"),
            ("kind: Model\n", "apiVersion is missing"),
            ("a: b\n---\nc: [\n", "document 1: apiVersion"),
            ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", "Pod"),
            ("apiVersion: pilotlight.dev/v1alpha1\nkind: Model\n", "metadata.name"),
            ("- just\n- a list\n", "apiVersion"),
            ("\t{", "neither YAML nor JSON"),
        ] {
            let failure = parse("file.yaml", text, "default").unwrap_err().to_string();
            assert!(failure.contains(words) && failure.contains("file.yaml"), "{text:?}: {failure}");
        }
    }
}
