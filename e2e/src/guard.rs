//! Everything that a cluster started ends with the process that started it, also when that one panics or is killed.
//!
//! A guard process waits at a pipe that only this process holds. Each program leads a process group of its own, which the
//! guard was told; when the pipe ends, the guard kills the groups, runs what was asked for at the end and removes the
//! folder. So neither destructors nor signal handlers of a test binary need to run, and Ctrl-C reaches the tests alone.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context as _, Result};

/// What the folders of runs are called, and the control groups of their nodes.
pub(crate) const PREFIX: &str = "pilotlight-k8s-";

/// `+N` adds a group, `-N` forgets one, `!COMMAND` is run after they are gone. They are killed at once: what they know
/// is not wanted any more. The guard is quiet, and ends by itself.
const SCRIPT: &str = r#"
trap '' INT TERM HUP
groups=' ' last=
while IFS= read -r line; do
  rest=${line#?}
  case $line in
    +*) groups="$groups$rest " ;;
    -*) groups=$(printf '%s' "$groups" | sed "s/ $rest / /") ;;
    '!'*) last="$last
$rest" ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group"; done
eval "$last"
[ -n "$KEEP" ] || rm -rf -- "$FOLDER" || { sleep 1; rm -rf -- "$FOLDER"; }
[ -z "$KEEP" ] || rm -f -- "$FOLDER/guard"
"#;

/// Its number, in the folder, as long as the folder is looked after.
const GUARD: &str = "guard";

/// Programs in groups of their own, their logs in one folder, and the process that ends them.
#[derive(Debug)]
pub struct Guard {
    folder: PathBuf,
    process: Child,
    pipe: Option<ChildStdin>,
}

/// A program that a guard looks after.
#[derive(Debug)]
pub struct Program {
    /// Its name, and that of its log.
    pub name: String,
    child: Child,
    log: PathBuf,
}

/// A program that was waited for.
#[derive(Debug)]
pub struct Ended(u32);

impl Guard {
    /// Guards a new folder below the system's one for temporary files. It is kept with `PILOTLIGHT_KEEP_CLUSTER=1`.
    ///
    /// # Errors
    /// When the folder or the process cannot be made.
    pub fn new() -> Result<Guard> {
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir().context("make a folder")?.keep();
        let mut process = Command::new("sh")
            .args(["-c", SCRIPT])
            .env("FOLDER", &folder)
            .env("KEEP", std::env::var_os("PILOTLIGHT_KEEP_CLUSTER").unwrap_or_default())
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("start sh")?;
        let pipe = process.stdin.take();
        std::fs::write(folder.join(GUARD), process.id().to_string()).context("note the guard")?;
        Ok(Guard { folder, process, pipe })
    }

    /// Where everything lies.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Starts a program in a group of its own; what it says goes to `NAME.log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(&mut self, name: &str, command: &mut Command) -> Result<Program> {
        self.spawn_with(name, command, Stdio::null())
    }

    /// The same with an input that stays open until this process ends, however it does.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) fn spawn_held(&mut self, name: &str, command: &mut Command) -> Result<Program> {
        self.spawn_with(name, command, Stdio::piped())
    }

    fn spawn_with(&mut self, name: &str, command: &mut Command, input: Stdio) -> Result<Program> {
        let log = self.folder.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log).context("open a log")?;
        let child = command
            .process_group(0)
            .stdin(input)
            .stdout(file.try_clone().context("share a log")?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        self.tell(&format!("+{}", child.id()))?;
        Ok(Program { name: name.into(), child, log })
    }

    /// Forgets a program that ended, so that its number, given to another, means nothing.
    ///
    /// # Errors
    /// When the guard is gone.
    pub fn forget(&mut self, ended: &Ended) -> Result<()> {
        self.tell(&format!("-{}", ended.0))
    }

    /// Has a line of shell run when everything is over and the programs are gone.
    ///
    /// # Errors
    /// When the guard is gone.
    pub fn at_the_end(&mut self, line: &str) -> Result<()> {
        self.tell(&format!("!{line}"))
    }

    fn tell(&mut self, line: &str) -> Result<()> {
        let pipe = self.pipe.as_mut().context("the guard is stopped")?;
        writeln!(pipe, "{line}").context("tell the guard")
    }
}

/// Removes what runs left whose guards were killed, too: folders and control groups. Their processes had nobody to end
/// them, but for those of nodes, which end with their test binary. Runs that were kept on purpose stay.
pub(crate) fn sweep() {
    let temporary = std::env::temp_dir();
    let over = |name: &str| {
        let folder = temporary.join(name);
        let Ok(guard) = std::fs::read_to_string(folder.join(GUARD)) else { return false };
        // A process of another's may have its number by now.
        let environment = std::fs::read(format!("/proc/{guard}/environ")).unwrap_or_default();
        let folder = format!("FOLDER={}", folder.display());
        !environment.split(|byte| *byte == 0).any(|variable| variable == folder.as_bytes())
    };
    crate::cgroups::sweep(PREFIX, over);
    for entry in std::fs::read_dir(&temporary).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(PREFIX) && over(&name) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pipe.take();
        let _ = self.process.wait();
    }
}

impl Program {
    /// Its process, which leads its group.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to its group. A group that is gone is no mistake.
    pub fn signal(&self, signal: &str) {
        let group = format!("-{}", self.child.id());
        let _ =
            Command::new("kill").args([&format!("-{signal}"), "--", &group]).stderr(Stdio::null()).status();
    }

    /// Ends it and everything in its group with a signal (`TERM`, `KILL`), and waits for it.
    pub fn finish(mut self, signal: &str) -> Ended {
        self.signal(signal);
        let _ = self.child.wait();
        self.signal("KILL");
        Ended(self.child.id())
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Everything it said so far.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The last lines it said, for the message of a failure.
    pub fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let from = lines.len().saturating_sub(20);
        format!("the last lines of {}:\n{}", self.name, lines[from..].join("\n"))
    }
}
