//! Source URIs, and the folder behind a `file://` one.

use std::fmt;
use std::io;
use std::path::{Component, Path, PathBuf};

/// The longest URI that is read; the Model's schema says the same.
pub const URI_BYTES_MAX: usize = 2048;

/// The schemes a source may have: a closed list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// A folder of this machine, or one mounted into it.
    File,
    /// The Hugging Face hub.
    Hf,
    /// Amazon S3 and its likes.
    S3,
    /// Google Cloud Storage.
    Gs,
    /// Azure Blob Storage.
    Az,
    /// A web server.
    Http,
    /// A web server, encrypted.
    Https,
}

impl Scheme {
    /// Every scheme.
    pub const ALL: [Scheme; 7] =
        [Scheme::File, Scheme::Hf, Scheme::S3, Scheme::Gs, Scheme::Az, Scheme::Http, Scheme::Https];

    /// As in a URI, without `://`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Scheme::File => "file",
            Scheme::Hf => "hf",
            Scheme::S3 => "s3",
            Scheme::Gs => "gs",
            Scheme::Az => "az",
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where a checkpoint comes from, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A folder.
    Folder {
        /// Absolute, decoded, without `.` and `..`.
        path: PathBuf,
    },
    /// A scheme that is known but not fetched from yet.
    Remote {
        /// Which.
        scheme: Scheme,
        /// As written.
        uri: String,
    },
}

/// Why a source cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Not a URI of a known form.
    #[error("source `{uri}` {problem}; write for example file:///models/qwen-7b")]
    Malformed {
        /// As given, cut to a readable length.
        uri: String,
        /// What is wrong.
        problem: String,
    },
    /// A scheme that nobody knows.
    #[error(
        "source `{uri}` has the unknown scheme `{scheme}`; known are file, hf, s3, gs, az, http and https"
    )]
    UnknownScheme {
        /// As given, cut to a readable length.
        uri: String,
        /// What stands before `://`.
        scheme: String,
    },
    /// A scheme that is known but not fetched from yet.
    #[error(
        "source `{uri}`: {scheme}:// is not supported yet; download the model and use file:///path/to/folder"
    )]
    Unsupported {
        /// As given.
        uri: String,
        /// Which.
        scheme: Scheme,
    },
    /// Nothing is there.
    #[error("source folder {path:?} does not exist on this node; check the path in spec.source.uri")]
    NotFound {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// Something else than a folder is there.
    #[error(
        "source {path:?} is not a folder; name the folder that holds config.json and the safetensors files"
    )]
    NotAFolder {
        /// What was found.
        path: PathBuf,
    },
    /// The system refuses the path.
    #[error("source folder {path:?} cannot be read; check its permissions")]
    Denied {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Outside of what this node may read.
    #[error("source folder {path:?} is outside of the folders this node may read ({}); move it there", roots(.allowed))]
    OutsideRoots {
        /// Where it leads, links followed.
        path: PathBuf,
        /// What would be allowed.
        allowed: Vec<PathBuf>,
    },
    /// A folder with too many files to be a model.
    #[error("source folder {path:?} holds more than {max} files; name the model's own folder")]
    TooManyFiles {
        /// Which.
        path: PathBuf,
        /// The bound.
        max: usize,
    },
}

fn roots(allowed: &[PathBuf]) -> String {
    allowed.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn shortened(uri: &str) -> String {
    uri.chars().take(200).collect()
}

impl Source {
    /// Reads a source URI.
    ///
    /// # Errors
    /// When it is no URI, has an unknown scheme, or a `file://` path that is not absolute and plain.
    pub fn parse(uri: &str) -> Result<Source, SourceError> {
        let malformed =
            |problem: &str| SourceError::Malformed { uri: shortened(uri), problem: problem.into() };
        if uri.len() > URI_BYTES_MAX {
            return Err(malformed(&format!("is longer than {URI_BYTES_MAX} bytes")));
        }
        let Some((scheme, rest)) = uri.split_once("://") else {
            let problem = if uri.starts_with('/') { "is a path, not a URI" } else { "has no scheme" };
            return Err(malformed(problem));
        };
        let scheme = scheme.to_ascii_lowercase();
        let Some(known) = Scheme::ALL.into_iter().find(|s| s.as_str() == scheme) else {
            return Err(SourceError::UnknownScheme { uri: shortened(uri), scheme: shortened(&scheme) });
        };
        if known != Scheme::File {
            return if rest.trim_matches('/').is_empty() {
                Err(malformed("names nothing after its scheme"))
            } else {
                Ok(Source::Remote { scheme: known, uri: uri.into() })
            };
        }
        file_path(rest).map(|path| Source::Folder { path }).map_err(malformed)
    }

    /// The folder that a `file://` source points to, checked to exist. `roots` are the folders that may be read, with
    /// everything below them; none at all means any folder.
    ///
    /// The answer has links followed, so that nobody can turn a link elsewhere after the check.
    ///
    /// # Errors
    /// When the scheme is not fetched from yet, or the folder is missing, not a folder, not readable or outside.
    pub fn folder(&self, roots: &[PathBuf]) -> Result<PathBuf, SourceError> {
        let path = match self {
            Source::Folder { path } => path,
            Source::Remote { scheme, uri } => {
                return Err(SourceError::Unsupported { uri: shortened(uri), scheme: *scheme });
            }
        };
        let refuse = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => SourceError::NotFound { path: path.clone() },
            io::ErrorKind::NotADirectory => SourceError::NotAFolder { path: path.clone() },
            _ => SourceError::Denied { path: path.clone(), source },
        };
        let real = path.canonicalize().map_err(refuse)?;
        // A root that does not exist allows nothing.
        let below = |root: &PathBuf| root.canonicalize().is_ok_and(|root| real.starts_with(root));
        if !roots.is_empty() && !roots.iter().any(below) {
            return Err(SourceError::OutsideRoots { path: real, allowed: roots.to_vec() });
        }
        if !real.metadata().map_err(refuse)?.is_dir() {
            return Err(SourceError::NotAFolder { path: real });
        }
        Ok(real)
    }
}

/// What stands after `file://` as an absolute path.
fn file_path(rest: &str) -> Result<PathBuf, &'static str> {
    let path = rest.strip_prefix("localhost").filter(|p| p.starts_with('/')).unwrap_or(rest);
    if !path.starts_with('/') {
        return Err("has no absolute path: a third slash is missing");
    }
    if path.contains(['?', '#']) {
        return Err("has a query or fragment, which a path has not (write ? as %3F and # as %23)");
    }
    let decoded = percent_decode(path).ok_or("has a broken %-escape")?;
    if decoded.contains('\0') {
        return Err("has a zero byte in its path");
    }
    let mut plain = PathBuf::from("/");
    for component in Path::new(&decoded).components() {
        match component {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => plain.push(name),
            Component::ParentDir | Component::Prefix(_) => return Err("has `..` in its path"),
        }
    }
    if plain == Path::new("/") {
        return Err("names the root of the file system");
    }
    Ok(plain)
}

/// Decodes `%XX`; none if an escape is broken or the result is no UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16));
            let (high, low) = (digit(bytes.next())?, digit(bytes.next())?);
            out.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            out.push(byte);
        }
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_uris_become_absolute_paths() {
        for (uri, path) in [
            ("file:///models/x", "/models/x"),
            ("FILE:///models/x/", "/models/x"),
            ("file://localhost/models/x", "/models/x"),
            ("file:///with%20blank/%C3%A9", "/with blank/é"),
            ("file:///a/./b", "/a/b"),
        ] {
            assert_eq!(Source::parse(uri).unwrap(), Source::Folder { path: path.into() }, "{uri}");
        }
    }

    #[test]
    fn bad_uris_say_what_is_wrong() {
        for (uri, expect) in [
            ("", "has no scheme"),
            ("/models/x", "is a path, not a URI"),
            ("models/x", "has no scheme"),
            ("file://models/x", "third slash"),
            ("file:///a/../b", "`..`"),
            ("file:///a/%2e%2e/b", "`..`"),
            ("file:///%zz", "broken %-escape"),
            ("file:///%f", "broken %-escape"),
            ("file:///a%00b", "zero byte"),
            ("file:///", "root of the file system"),
            ("file:///a?b", "query"),
            ("ftp://x/y", "unknown scheme `ftp`"),
            ("hf://", "names nothing"),
        ] {
            let error = Source::parse(uri).unwrap_err().to_string();
            assert!(error.contains(expect), "{uri}: {error}");
        }
        assert!(Source::parse(&format!("file:///{}", "x".repeat(3000))).is_err());
    }

    #[test]
    fn schemes_to_come_are_parsed_and_refused_by_name() {
        for scheme in ["hf", "s3", "gs", "az", "http", "https"] {
            let source = Source::parse(&format!("{scheme}://org/model")).unwrap();
            let error = source.folder(&[]).unwrap_err();
            assert!(matches!(error, SourceError::Unsupported { .. }));
            assert!(error.to_string().contains("not supported yet") && error.to_string().contains("file://"));
        }
    }

    #[test]
    fn a_folder_is_found_below_its_roots_only() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (inside, outside) = (root.join("in"), root.join("out"));
        std::fs::create_dir_all(inside.join("model")).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        std::fs::write(inside.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("escape")).unwrap();
        let find = |path: PathBuf| Source::Folder { path }.folder(std::slice::from_ref(&inside));
        assert_eq!(find(inside.join("model")).unwrap(), inside.join("model"));
        assert!(matches!(find(inside.join("gone")), Err(SourceError::NotFound { .. })));
        assert!(matches!(find(inside.join("file")), Err(SourceError::NotAFolder { .. })));
        assert!(matches!(find(inside.join("file/below")), Err(SourceError::NotAFolder { .. })));
        assert!(matches!(find(inside.join("escape")), Err(SourceError::OutsideRoots { .. })));
        assert!(matches!(find(outside.clone()), Err(SourceError::OutsideRoots { .. })));
        assert!(Source::Folder { path: outside }.folder(&[]).is_ok());
    }
}
