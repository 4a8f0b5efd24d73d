//! An OCI image of one layer, as a tar in the OCI layout: what `ctr images import`, `podman load` and `skopeo` take.
//!
//! Nothing in it tells when or where it was made: files are sorted, their times are zero, their owners are given.

use std::collections::BTreeMap;
use std::io::Write as _;

use anyhow::Context as _;
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};

/// One entry of a layer.
struct Entry {
    /// None: a folder.
    bytes: Option<Vec<u8>>,
    mode: u32,
    owner: u32,
}

/// The files and folders of a layer by path, without a slash at the front. A folder comes before what lies in it.
#[derive(Default)]
pub(super) struct Tree(BTreeMap<String, Entry>);

impl Tree {
    /// A file of root's.
    pub(super) fn file(&mut self, path: &str, bytes: Vec<u8>, mode: u32) {
        self.parents(path);
        self.0.insert(path.to_owned(), Entry { bytes: Some(bytes), mode, owner: 0 });
    }

    /// A folder.
    pub(super) fn folder(&mut self, path: &str, mode: u32, owner: u32) {
        self.parents(path);
        self.0.insert(format!("{path}/"), Entry { bytes: None, mode, owner });
    }

    fn parents(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            let folder = Entry { bytes: None, mode: 0o755, owner: 0 };
            self.0.entry(format!("{}/", &path[..at])).or_insert(folder);
        }
    }

    fn tar(&self) -> anyhow::Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        for (path, entry) in &self.0 {
            let kind = if entry.bytes.is_some() { EntryType::Regular } else { EntryType::Directory };
            add(&mut tar, kind, path, entry.bytes.as_deref().unwrap_or_default(), (entry.mode, entry.owner))?;
        }
        tar.into_inner().context("end the layer")
    }
}

/// An image.
pub(super) struct Image {
    /// With the registry's host, or runtimes look for it elsewhere.
    pub(super) name: String,
    pub(super) version: String,
    pub(super) architecture: &'static str,
    /// What it runs.
    pub(super) program: String,
    /// What that is given first.
    pub(super) args: Vec<String>,
    /// Whom it runs as.
    pub(super) account: u32,
    pub(super) tree: Tree,
}

impl Image {
    /// The whole tar.
    pub(super) fn pack(&self) -> anyhow::Result<Vec<u8>> {
        let layer = self.tree.tar()?;
        let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::default());
        gzip.write_all(&layer).context("compress the layer")?;
        let mut blobs = Blobs::default();
        let compressed = gzip.finish().context("compress the layer")?;
        let layers = blobs.put(compressed, "application/vnd.oci.image.layer.v1.tar+gzip");
        let config = blobs.put(
            serde_json::to_vec(&self.config(&digest(&layer)))?,
            "application/vnd.oci.image.config.v1+json",
        );
        let manifest = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config, "layers": [layers],
        });
        let mut described =
            blobs.put(serde_json::to_vec(&manifest)?, "application/vnd.oci.image.manifest.v1+json");
        described["platform"] = json!({ "architecture": self.architecture, "os": "linux" });
        described["annotations"] = json!({
            "io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": self.version,
        });
        let index = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [described],
        });
        let mut tar = tar::Builder::new(Vec::new());
        let mut file = |path: &str, bytes: &[u8]| add(&mut tar, EntryType::Regular, path, bytes, (0o644, 0));
        file("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        file("index.json", &serde_json::to_vec(&index)?)?;
        for (digest, bytes) in &blobs.0 {
            file(&format!("blobs/sha256/{digest}"), bytes)?;
        }
        tar.into_inner().context("end the image")
    }

    fn config(&self, layer: &str) -> Value {
        let mut entrypoint = vec![format!("/{}", self.program)];
        entrypoint.extend(self.args.iter().cloned());
        json!({
            "architecture": self.architecture,
            "os": "linux",
            "config": {
                "User": format!("{0}:{0}", self.account),
                "Entrypoint": entrypoint,
                "Env": ["PATH=/usr/bin", "HOME=/home/pilotlight"],
                "WorkingDir": "/home/pilotlight",
                "Labels": {
                    "org.opencontainers.image.title": "pilotlight",
                    "org.opencontainers.image.version": self.version,
                    "org.opencontainers.image.licenses": env!("CARGO_PKG_LICENSE"),
                },
            },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer}")] },
        })
    }
}

/// What the image is made of, by digest.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    /// Takes a blob and returns its descriptor.
    fn put(&mut self, bytes: Vec<u8>, kind: &str) -> Value {
        let digest = digest(&bytes);
        let described =
            json!({ "mediaType": kind, "digest": format!("sha256:{digest}"), "size": bytes.len() });
        self.0.insert(digest, bytes);
        described
    }
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn add(
    tar: &mut tar::Builder<Vec<u8>>,
    kind: EntryType,
    path: &str,
    bytes: &[u8],
    (mode, owner): (u32, u32),
) -> anyhow::Result<()> {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(owner.into());
    header.set_gid(owner.into());
    header.set_mtime(0);
    header.set_size(bytes.len() as u64);
    tar.append_data(&mut header, path, bytes).with_context(|| format!("add {path}"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::io::Read as _;

    use super::*;

    fn small() -> Image {
        let mut tree = Tree::default();
        tree.folder("tmp", 0o1777, 0);
        tree.file("usr/bin/pilotlight", b"the program".to_vec(), 0o755);
        tree.file("lib64/ld.so", b"its loader".to_vec(), 0o755);
        tree.folder("home/pilotlight", 0o750, 65_532);
        Image {
            name: "localhost/pilotlight:1".into(),
            version: "1".into(),
            architecture: "amd64",
            program: "usr/bin/pilotlight".into(),
            args: vec!["--first".into()],
            account: 65_532,
            tree,
        }
    }

    /// Everything in a tar, read back: its bytes, mode, owner.
    fn unpack(bytes: &[u8]) -> Vec<(String, Vec<u8>, u32, u64)> {
        let mut archive = tar::Archive::new(bytes);
        let entries = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let header = entry.header();
            assert_eq!(header.mtime().unwrap(), 0);
            let (mode, owner) = (header.mode().unwrap(), header.uid().unwrap());
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (path, bytes, mode, owner)
        });
        entries.collect()
    }

    #[test]
    fn the_same_files_give_the_same_bytes() {
        assert_eq!(small().pack().unwrap(), small().pack().unwrap());
    }

    #[test]
    fn every_digest_leads_to_what_it_names() {
        let packed = small().pack().unwrap();
        let files: HashMap<String, Vec<u8>> =
            unpack(&packed).into_iter().map(|(path, bytes, _, _)| (path, bytes)).collect();
        let layout: Value = serde_json::from_slice(&files["oci-layout"]).unwrap();
        assert_eq!(layout["imageLayoutVersion"], "1.0.0");
        let follow = |described: &Value| {
            let hex = described["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let bytes = &files[&format!("blobs/sha256/{hex}")];
            assert_eq!(described["size"], bytes.len());
            assert_eq!(digest(bytes), hex);
            bytes.clone()
        };
        let json = |bytes: Vec<u8>| serde_json::from_slice::<Value>(&bytes).unwrap();
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        let described = &index["manifests"][0];
        assert_eq!(described["annotations"]["io.containerd.image.name"], "localhost/pilotlight:1");
        let manifest = json(follow(described));
        let config = json(follow(&manifest["config"]));
        assert_eq!(config["config"]["User"], "65532:65532");
        assert_eq!(config["config"]["Entrypoint"], json!(["/usr/bin/pilotlight", "--first"]));
        let mut layer = Vec::new();
        let compressed = follow(&manifest["layers"][0]);
        flate2::read::GzDecoder::new(compressed.as_slice()).read_to_end(&mut layer).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", digest(&layer)));
        assert_eq!(files.len(), 2 + 3, "nothing that no digest leads to");

        let entries = unpack(&layer);
        let paths: Vec<&str> = entries.iter().map(|(path, ..)| path.as_str()).collect();
        assert_eq!(
            paths,
            [
                "home/",
                "home/pilotlight/",
                "lib64/",
                "lib64/ld.so",
                "tmp/",
                "usr/",
                "usr/bin/",
                "usr/bin/pilotlight"
            ]
        );
        assert_eq!((entries[1].2, entries[1].3), (0o750, 65_532));
        assert_eq!((entries[4].2, entries[4].3), (0o1777, 0));
        assert_eq!((entries[7].1.as_slice(), entries[7].2), (b"the program".as_slice(), 0o755));
    }
}
