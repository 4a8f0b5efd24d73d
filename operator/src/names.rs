//! The name of the one ModelReplica object per model and node: `<model>-<node>`, made safe.
//!
//! Models may have names of 52 characters and nodes of 253, an object's name should have at most 63; what is cut off,
//! or could be read two ways, is told apart by a hash. The name is a function of both, so that two operators write
//! the same object.

use pilotlight_domain::NodeName;

const NAME_CHARS_MAX: usize = 63;
const HASH_CHARS: usize = 10;

/// The object's name.
pub(crate) fn replica_name(model: &str, node: &NodeName) -> String {
    let node = node.as_str();
    let plain = format!("{model}-{node}");
    // `a-b` on `c` and `a` on `b-c` are both `a-b-c`: only names without dashes are clear. Dots are fine in object
    // names, but not in the label that selects them.
    if plain.len() <= NAME_CHARS_MAX && !node.contains('-') && !plain.contains('.') {
        return plain;
    }
    let tail = format!("-{}", hash(model, node));
    let mut name: String = plain.replace('.', "-").chars().take(NAME_CHARS_MAX - HASH_CHARS - 1).collect();
    name.truncate(name.trim_end_matches('-').len());
    name + &tail
}

/// FNV-1a over both, apart: stable over versions and machines, and nobody gains by a collision.
fn hash(model: &str, node: &str) -> String {
    let bytes = model.bytes().chain([0]).chain(node.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")[..HASH_CHARS].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(model: &str, node: &str) -> String {
        replica_name(model, &node.parse().unwrap())
    }

    #[test]
    fn short_names_are_plain() {
        assert_eq!(name("qwen-7b", "node1"), "qwen-7b-node1");
    }

    #[test]
    fn every_name_is_a_label_and_tells_models_and_nodes_apart() {
        let long = "x".repeat(52);
        let cases = [
            ("a-b", "c-d"),
            ("a", "b-c-d"),
            ("llama-3.1", "n"),
            ("llama-3-1", "n"),
            (long.as_str(), "ip-10-0-0-1.eu-central-1.compute.internal"),
            (long.as_str(), "ip-10-0-0-2.eu-central-1.compute.internal"),
        ];
        let names: Vec<String> = cases.iter().map(|(model, node)| name(model, node)).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(name.len() <= 63 && !name.contains('.') && !name.contains("--"), "{name}");
            assert!(!names[..i].contains(name), "{name}");
        }
    }
}
