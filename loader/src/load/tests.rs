//! Loads with both readers on a healthy and a faulty disk: right bytes or one reason, and every chunk back.

use std::sync::mpsc::{Receiver, channel};

use pilotlight_testkit::checkpoint::TinyCheckpoint;
use pilotlight_testkit::disk::{DiskFault, FaultPlan, Gate};
use tempfile::TempDir;

use super::*;
use crate::convert::{ConvertOptions, convert};
use crate::mapping::PoolMap;
use crate::readers::tests::{CHUNK, Faulty, kinds};

struct World {
    _dir: TempDir,
    path: PathBuf,
    checkpoint: Checkpoint,
    pool: Arc<HostPool>,
    options: LoadOptions,
}

/// A converted checkpoint of several chunks in two files, and a pool that it fits in.
fn world(kind: ReaderKind) -> World {
    let dir = tempfile::tempdir().unwrap();
    let (src, path) = (dir.path().join("src"), dir.path().join("ours"));
    TinyCheckpoint::llama(6).random("odd", "U8", &[1001], 1).shards(2).write(&src).unwrap();
    let options = ConvertOptions { chunk_bytes: CHUNK, ..Default::default() };
    convert(&src, &path, &options, &|_| (), &CancelFlag::new()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let chunks = checkpoint.chunks(CHUNK);
    let pool = HostPool::create(ByteCount::new((chunks + 2) * CHUNK.get()), CHUNK).unwrap();
    let options = LoadOptions {
        reader: kind,
        block_bytes: ByteCount::from_kib(16),
        depth: 6,
        ..LoadOptions::default()
    };
    World { _dir: dir, path, checkpoint, pool, options }
}

impl World {
    fn chunks(&self) -> Vec<FreeChunk> {
        self.pool.take(self.checkpoint.chunks(self.pool.chunk_bytes()) as u32).unwrap()
    }

    /// Starts a load on a disk with faults.
    fn start(&self, plan: &FaultPlan) -> (LoadHandle, Receiver<LoadProgress>, Receiver<Outcome>) {
        let (progress, told) = channel();
        let (end, ended) = channel();
        let (plan, options) = (plan.clone(), self.options);
        let open = move |files, register, chunks: &[FreeChunk]| {
            let buffers = Buffers { chunks, register };
            Ok(Faulty::over(readers::open(options.reader, files, options.depth, &buffers)?, plan))
        };
        let handle = Load::start_with(
            &self.pool,
            &self.checkpoint,
            self.chunks(),
            self.options,
            CancelFlag::new(),
            open,
            move |p| progress.send(p).unwrap_or(()),
            move |o| drop(end.send(o)),
        );
        (handle, told, ended)
    }

    fn run(&self, plan: &FaultPlan) -> Outcome {
        let (handle, _, ended) = self.start(plan);
        let outcome = ended.recv().unwrap();
        handle.join();
        assert!(ended.recv().is_err(), "exactly one answer");
        outcome
    }

    fn failure(&self, plan: &FaultPlan) -> LoadError {
        let Outcome::Failed(error) = self.run(plan) else { panic!("it did not fail") };
        assert_eq!(self.pool.chunks_free(), self.pool.chunks_total(), "every chunk is back: {error}");
        error
    }

    fn assert_right(&self, outcome: Outcome) {
        let loaded = match outcome {
            Outcome::Ready(loaded) => loaded,
            other => panic!("{other:?}"),
        };
        assert!(loaded.verified || self.checkpoint.manifest().is_none());
        for (file, on_disk) in loaded.files.iter().zip(self.checkpoint.files()) {
            let bytes: Vec<u8> = file.chunks.iter().flat_map(|c| c.bytes().to_vec()).collect();
            assert!(bytes == std::fs::read(&on_disk.path).unwrap(), "{}", file.name);
        }
        drop(loaded);
        assert_eq!(self.pool.chunks_free(), self.pool.chunks_total());
    }
}

fn each_reader(test: impl Fn(World)) {
    for kind in kinds() {
        test(world(kind));
    }
}

#[test]
fn a_load_is_right_and_tells_its_verified_prefix() {
    each_reader(|world| {
        let (handle, told, ended) = world.start(&FaultPlan::new());
        let outcome = ended.recv().unwrap();
        handle.join();
        let told: Vec<LoadProgress> = told.iter().collect();
        assert!(told.windows(2).all(|w| w[0].chunks <= w[1].chunks && w[0].bytes < w[1].bytes));
        let last = told.last().unwrap();
        assert_eq!((u64::from(last.chunks), last.bytes), (world.checkpoint.chunks(CHUNK), last.total));
        world.assert_right(outcome);
    });
}

#[test]
fn a_worker_maps_what_was_loaded() {
    let world = world(ReaderKind::Auto);
    let chunks = world.chunks();
    let layout = layout(&world.checkpoint, CHUNK, &chunks).unwrap();
    let options = world.options;
    let outcome = Load::run_until(&world.pool, &world.checkpoint, chunks, options, &CancelFlag::new());
    let Outcome::Ready(loaded) = outcome else { panic!("{outcome:?}") };
    let map = PoolMap::from_fd(world.pool.dup_fd().unwrap(), CHUNK, world.pool.chunks_total()).unwrap();
    for (file, on_disk) in layout.iter().zip(world.checkpoint.files()) {
        let mapped = map.map_file(&file.chunks, file.bytes).unwrap();
        assert!(*mapped == std::fs::read(&on_disk.path).unwrap()[..]);
    }
    assert!(
        loaded.files.iter().zip(&layout).all(|(l, f)| l
            .chunks
            .iter()
            .map(Resident::index)
            .eq(f.chunks.clone()))
    );
}

#[test]
fn a_plain_folder_loads_unverified() {
    for kind in kinds() {
        let mut world = world(kind);
        world.checkpoint = Checkpoint::open(&world.path.with_file_name("src")).unwrap();
        let outcome = world.run(&FaultPlan::new());
        assert!(matches!(&outcome, Outcome::Ready(l) if !l.verified));
        world.assert_right(outcome);
    }
}

#[test]
fn short_reads_and_interruptions_are_finished() {
    each_reader(|world| {
        let plan = FaultPlan::new()
            .with(0, 0, 3, DiskFault::Short(5000))
            .with(0, 70_000, 1, DiskFault::Short(1))
            .with(1, 0, 2, DiskFault::Error(libc::EINTR))
            .with(1, 70_000, 1, DiskFault::Error(libc::EAGAIN));
        world.assert_right(world.run(&plan));
    });
}

#[test]
fn a_disk_that_gives_only_crumbs_is_given_up() {
    each_reader(|world| {
        if !OpenFile::open(&world.checkpoint.files()[0].path).unwrap().direct() {
            return; // Past the page cache a single byte is nothing; through it, the load creeps to its end.
        }
        let error = world.failure(&FaultPlan::new().with(0, 0, u32::MAX, DiskFault::Short(1)));
        assert!(matches!(error, LoadError::Fault(Fault::Read { .. })), "{error:?}");
    });
}

#[test]
fn an_io_error_names_file_and_place() {
    each_reader(|world| {
        let error = world.failure(&FaultPlan::new().with(1, 70_000, 1, DiskFault::Error(libc::EIO)));
        let LoadError::Fault(Fault::Read { path, offset, source, .. }) = &error else { panic!("{error:?}") };
        assert!(path.ends_with("model-00002-of-00002.safetensors"));
        assert_eq!((*offset, source.raw_os_error()), (65_536, Some(libc::EIO)));
        assert!(!error.is_damage());
    });
}

#[test]
fn a_flipped_bit_is_refused_by_chunk_and_tensor() {
    each_reader(|world| {
        let error = world.failure(&FaultPlan::new().with(0, 70_000, 1, DiskFault::Flip(77)));
        let text = error.to_string();
        assert!(
            text.contains("chunk 1 (bytes 65536 to 131072)") && text.contains("in tensor model."),
            "{text}"
        );
        assert!(error.is_damage());
    });
}

#[test]
fn a_file_cut_after_it_was_opened_is_truncated() {
    each_reader(|world| {
        let file = &world.checkpoint.files()[1];
        let cut = file.bytes.get() - 5000;
        // Before the load opens it: another length than the manifest's.
        let handle = std::fs::OpenOptions::new().write(true).open(&file.path).unwrap();
        handle.set_len(cut).unwrap();
        assert!(matches!(world.failure(&FaultPlan::new()), LoadError::Length { .. }));
        // After: the disk gives nothing where bytes should be.
        handle.set_len(file.bytes.get()).unwrap();
        let plan = FaultPlan::new().with(1, cut, u32::MAX, DiskFault::Short(0));
        let error = world.failure(&plan);
        assert!(matches!(error, LoadError::Fault(Fault::Truncated { .. })) && error.is_damage(), "{error:?}");
    });
}

#[test]
fn a_stalled_disk_ends_the_load_in_time_and_chunks_come_when_it_answers() {
    each_reader(|mut world| {
        world.options.stall = Duration::from_millis(50);
        let gate = Gate::new();
        let (handle, _, ended) = world.start(&FaultPlan::new().with(1, 0, 1, DiskFault::Stall(gate.clone())));
        let Outcome::Failed(error) = ended.recv().unwrap() else { panic!("it did not fail") };
        assert!(matches!(error, LoadError::Fault(Fault::Stalled { .. })), "{error:?}");
        assert!(error.to_string().contains("the disk gave nothing"));
        // All but the chunk that the disk still has.
        assert_eq!(world.pool.chunks_free(), world.pool.chunks_total() - 1);
        gate.open();
        handle.join();
        assert_eq!(world.pool.chunks_free(), world.pool.chunks_total());
    });
}

#[test]
fn a_cancelled_load_says_so_and_returns_everything() {
    each_reader(|world| {
        let gate = Gate::new();
        // Held half-way, so that the cancel comes before the end.
        let (handle, told, ended) =
            world.start(&FaultPlan::new().with(1, 0, 1, DiskFault::Stall(gate.clone())));
        told.recv().unwrap();
        handle.cancel();
        gate.open();
        assert!(matches!(ended.recv().unwrap(), Outcome::Cancelled));
        handle.join();
        assert_eq!(world.pool.chunks_free(), world.pool.chunks_total());
    });
}

#[test]
fn a_changed_tokenizer_is_never_served() {
    let world = world(ReaderKind::Pread);
    std::fs::write(world.path.join("tokenizer.json"), "{\"version\":\"6.6\"}").unwrap();
    let error = world.failure(&FaultPlan::new());
    assert!(matches!(&error, LoadError::File { path } if path.ends_with("tokenizer.json")), "{error:?}");
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let world = world(ReaderKind::Pread);
    let few = world.pool.take(1).unwrap();
    let outcome = Load::run_until(&world.pool, &world.checkpoint, few, world.options, &CancelFlag::new());
    assert!(matches!(outcome, Outcome::Failed(LoadError::ChunkCount { given: 1, .. })), "{outcome:?}");
    let other = HostPool::create(ByteCount::from_mib(1), ByteCount::from_kib(32)).unwrap();
    let chunks = other.take(32).unwrap();
    let outcome = Load::run_until(&other, &world.checkpoint, chunks, world.options, &CancelFlag::new());
    assert!(matches!(outcome, Outcome::Failed(LoadError::ChunkSize { .. })), "{outcome:?}");
    let odd = LoadOptions { block_bytes: ByteCount::new(1000), ..world.options };
    let chunks = world.chunks();
    let outcome = Load::run_until(&world.pool, &world.checkpoint, chunks, odd, &CancelFlag::new());
    assert!(matches!(outcome, Outcome::Failed(LoadError::BlockSize(_))), "{outcome:?}");
    assert_eq!(world.pool.chunks_free(), world.pool.chunks_total());
}

#[test]
fn a_panicking_callback_still_ends_in_an_answer() {
    let world = world(ReaderKind::Pread);
    let (end, ended) = channel();
    let chunks = world.chunks();
    let on_end = move |o| drop(end.send(o));
    let handle =
        Load::start(&world.pool, &world.checkpoint, chunks, world.options, |_| panic!("as planned"), on_end);
    assert!(matches!(ended.recv().unwrap(), Outcome::Failed(LoadError::Panicked)));
    handle.join();
    assert_eq!(world.pool.chunks_free(), world.pool.chunks_total());
}
