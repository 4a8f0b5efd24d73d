//! How much memory there is to take: of the machine, of the control group, of the process.
//!
//! It deliberately does **not** look at what is free now: that changes, and the page cache counts as used.

use std::fs;
use std::path::Path;

use pilotlight_domain::ByteCount;
use rustix::process::{Resource, getrlimit};

use super::PoolError;

/// A process with a pool has so much more mapped: its program, its threads' stacks, its allocator's arenas (64 MiB of
/// addresses for each thread), and the way to a huge page's boundary.
const MAPPED_BESIDE: ByteCount = ByteCount::from_mib(1024);

/// Refuses a pool that no process here can have, with both sizes: `wanted` in one process, `together` in all of this
/// machine's.
///
/// # Errors
/// [`PoolError::TooLarge`].
pub fn check_limits(wanted: ByteCount, together: ByteCount) -> Result<(), PoolError> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:")).and_then(kib);
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = of_group(Path::new("/sys/fs/cgroup"), &own);
    let addresses = getrlimit(Resource::As).current.map(ByteCount::new);
    let left = addresses.map(|limit| ByteCount::new(limit.get().saturating_sub(MAPPED_BESIDE.get())));
    for (wanted, limit, whose) in [
        (together, machine, "this machine has"),
        (together, group, "this container or control group may use"),
        (wanted, left, "its limit of addresses (`ulimit -v`) leaves beside the program"),
    ] {
        if let Some(limit) = limit.filter(|&limit| wanted > limit) {
            return Err(PoolError::TooLarge { wanted, limit, whose });
        }
    }
    Ok(())
}

/// The number of a meminfo line: `  123 kB`.
fn kib(text: &str) -> Option<ByteCount> {
    text.trim().strip_suffix("kB")?.trim().parse().ok().map(ByteCount::from_kib)
}

/// The least limit of a process's memory control groups, its own and those above; `own` is `/proc/self/cgroup`. Both
/// versions. In a container the path may be the host's, which is not there: then the root is the container's.
fn of_group(root: &Path, own: &str) -> Option<ByteCount> {
    let mut least = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            names if names.split(',').any(|name| name == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let folder = root.join(path.trim_start_matches('/'));
        for group in folder.ancestors().take_while(|folder| folder.starts_with(&root)) {
            let limit = fs::read_to_string(group.join(file)).ok().and_then(|text| text.trim().parse().ok());
            least = [least, limit.map(ByteCount::new)].into_iter().flatten().min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_all_groups_above_counts() {
        let dir = tempfile::tempdir().unwrap();
        let set = |group: &str, file: &str, text: &str| {
            fs::create_dir_all(dir.path().join(group)).unwrap();
            fs::write(dir.path().join(group).join(file), text).unwrap();
        };
        let check = |own: &str, expect: Option<u64>| {
            assert_eq!(of_group(dir.path(), own), expect.map(ByteCount::new), "{own}");
        };
        check("0::/a/b\n", None);
        set("a", "memory.max", "5000\n");
        set("a/b", "memory.max", "max\n");
        check("0::/a/b\n", Some(5000));
        check("0::/\n", None);
        set("", "memory.max", "7000\n");
        check("0::/a/b\n", Some(5000));
        check("0::/not/here\n", Some(7000));
        set("memory/c", "memory.limit_in_bytes", "300\n");
        set("memory", "memory.limit_in_bytes", "9223372036854771712\n");
        check("4:cpu,memory:/c\n1:cpu:/a\n", Some(300));
        check("4:memory:/\n", Some(9_223_372_036_854_771_712));
        check("nonsense", None);
    }

    #[test]
    fn what_is_too_large_together_is_refused_with_both_sizes() {
        let (one, all) = (ByteCount::from_mib(1), ByteCount::new(1 << 60));
        let error = check_limits(one, all).unwrap_err().to_string();
        assert!(error.contains("1048576TiB") && error.contains("--host-memory"), "{error}");
        check_limits(one, one).unwrap();
    }
}
