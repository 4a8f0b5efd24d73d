//! The documents by which a client learns what there is.

use pilotlight_api::schema;
use serde_json::{Value, json};

use crate::Kind;

/// The document at a path, if there is one.
pub(super) fn document(path: &str) -> Option<Value> {
    let document = match path.trim_end_matches('/') {
        "/version" => json!({
            "major": "1", "minor": "33", "gitVersion": concat!("v1.33.0+pilotlight-", env!("CARGO_PKG_VERSION")),
            "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "",
            "compiler": "rustc", "platform": "linux/amd64",
        }),
        "/api" => json!({ "kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [] }),
        "/apis" => {
            let groups: Vec<Value> = GROUPS.iter().map(group).collect();
            json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups })
        }
        "/api/v1" => {
            let mut resources = resources("v1");
            resources.push(json!({
                "name": "namespaces", "singularName": "namespace", "kind": "Namespace", "namespaced": false,
                "shortNames": ["ns"], "verbs": ["get", "list"],
            }));
            resource_list("v1", &resources)
        }
        "/openapi/v3" => json!({ "paths": { OURS: { "serverRelativeURL": format!("/openapi/v3/{OURS}") } } }),
        "/openapi/v3/apis/pilotlight.dev/v1alpha1" => openapi(),
        other => {
            let rest = other.strip_prefix("/apis/")?;
            if let Some(group) = GROUPS.iter().find(|group| group.0 == rest) {
                let mut document = self::group(group);
                document["kind"] = "APIGroup".into();
                document["apiVersion"] = "v1".into();
                return Some(document);
            }
            let known = GROUPS
                .iter()
                .any(|(group, version)| rest.strip_prefix(group) == Some(&format!("/{version}")));
            return known.then(|| resource_list(rest, &resources(rest)));
        }
    };
    Some(document)
}

const OURS: &str = "apis/pilotlight.dev/v1alpha1";

const GROUPS: [(&str, &str); 2] =
    [(pilotlight_api::GROUP, pilotlight_api::VERSION), ("coordination.k8s.io", "v1")];

fn group((name, version): &(&str, &str)) -> Value {
    let version = json!({ "groupVersion": format!("{name}/{version}"), "version": version });
    json!({ "name": name, "versions": [version], "preferredVersion": version })
}

fn resource_list(version: &str, resources: &[Value]) -> Value {
    json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources })
}

fn resources(api_version: &str) -> Vec<Value> {
    let mut resources = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|kind| kind.api_version() == api_version) {
        let (short, categories): (&[&str], &[&str]) = match kind {
            Kind::Model => (&["mdl"], &["all", "ai", "pilotlight"]),
            Kind::ModelReplica => (&["mr"], &["pilotlight"]),
            Kind::ModelNode => (&["mn"], &["pilotlight"]),
            Kind::Event => (&["ev"], &[]),
            Kind::Node => (&["no"], &[]),
            Kind::Lease | Kind::Secret => (&[], &[]),
        };
        resources.push(json!({
            "name": kind.plural(), "singularName": kind.name().to_lowercase(), "kind": kind.name(),
            "namespaced": kind.namespaced(), "shortNames": short, "categories": categories,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        }));
        if kind.has_status() {
            resources.push(json!({
                "name": format!("{}/status", kind.plural()), "singularName": "", "kind": kind.name(),
                "namespaced": kind.namespaced(), "verbs": ["get", "patch", "update"],
            }));
        }
    }
    resources
}

/// As much as kubectl needs to leave the validation to us, and to explain fields.
fn openapi() -> Value {
    let ours = Kind::ALL.into_iter().filter(|kind| kind.has_status());
    let (mut paths, mut schemas) = (json!({}), json!({}));
    for kind in ours {
        let named = json!({
            "group": pilotlight_api::GROUP, "version": pilotlight_api::VERSION, "kind": kind.name(),
        });
        let parameter = json!({ "name": "fieldValidation", "in": "query", "schema": { "type": "string" } });
        let path = format!("{}/{{name}}", kind.path(None).replace(kind.plural(), &in_namespace(kind)));
        paths[path] = json!({ "patch": {
            "parameters": [parameter], "responses": {}, "x-kubernetes-action": "patch",
            "x-kubernetes-group-version-kind": named,
        } });
        let mut schema = schema::of(kind.name()).cloned().unwrap_or_default();
        schema["x-kubernetes-group-version-kind"] = json!([named]);
        schemas[format!("dev.pilotlight.v1alpha1.{}", kind.name())] = schema;
    }
    let info = json!({ "title": "Pilotlight", "version": env!("CARGO_PKG_VERSION") });
    json!({ "openapi": "3.0.0", "info": info, "paths": paths, "components": { "schemas": schemas } })
}

fn in_namespace(kind: Kind) -> String {
    let plural = kind.plural();
    if kind.namespaced() { format!("namespaces/{{namespace}}/{plural}") } else { plural.to_owned() }
}

/// Namespaces are names and nothing else: each that is asked for is there.
pub(super) fn namespaces(name: Option<&str>) -> Value {
    let namespace = |name: &str| {
        json!({
            "kind": "Namespace", "apiVersion": "v1",
            "metadata": { "name": name, "uid": name, "resourceVersion": "1", "labels": { "kubernetes.io/metadata.name": name } },
            "status": { "phase": "Active" },
        })
    };
    match name {
        Some(name) => namespace(name),
        None => json!({
            "kind": "NamespaceList", "apiVersion": "v1", "metadata": { "resourceVersion": "1" },
            "items": [namespace("default")],
        }),
    }
}
