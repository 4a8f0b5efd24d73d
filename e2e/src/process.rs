//! A program that never outlives the test.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Starts the program and kills it when its own standard input ends, which is when the test drops the other end, or dies.
/// The program's own is empty. Ends as soon as the program does.
const KEEPER: &str =
    r#"exec 3<&0; "$@" </dev/null 3<&- & child=$!; { read -r _ <&3; kill -KILL "$child"; } & wait "$child""#;

/// A running program, its output in a file. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    keeper: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `program`; what it says goes to `folder/name.log`.
    ///
    /// # Errors
    /// If the log cannot be written, or no shell can be started.
    pub fn start<S: AsRef<OsStr>>(
        name: &str,
        folder: &Path,
        program: &Path,
        args: impl IntoIterator<Item = S>,
    ) -> io::Result<Process> {
        let path = folder.join(format!("{name}.log"));
        let log = File::options().create(true).append(true).open(&path)?;
        let keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .arg(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Process { name: name.to_owned(), keeper, log: path })
    }

    /// Whether it has not ended by itself.
    pub fn is_running(&mut self) -> bool {
        matches!(self.keeper.try_wait(), Ok(None))
    }

    /// Its last words, for a failed test.
    pub fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        format!("{}:\n{}", self.name, lines[lines.len().saturating_sub(15)..].join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_ends_with_its_value() {
        let dir = tempfile::tempdir().unwrap();
        let script = r#"echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 1000"#;
        let script = format!("cd '{}'; {script}", dir.path().display());
        let mut process = Process::start("sleep", dir.path(), Path::new("sh"), ["-c", &script]).unwrap();
        let pid = loop {
            if let Ok(pid) = std::fs::read_to_string(dir.path().join("pid")) {
                break pid;
            }
            assert!(process.is_running(), "{}", process.last_words());
            std::thread::yield_now();
        };
        assert!(Path::new("/proc").join(pid.trim()).exists());
        drop(process);
        assert!(!Path::new("/proc").join(pid.trim()).exists());
    }

    #[test]
    fn a_program_that_fails_has_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let args = ["-c", "echo the cause >&2; exit 3"];
        let mut process = Process::start("failing", dir.path(), Path::new("sh"), args).unwrap();
        while process.is_running() {
            std::thread::yield_now();
        }
        assert_eq!(process.last_words(), "failing:\nthe cause");
    }
}
