//! The CPU as a place to compute: kernels, threads and scratch, and the products that are dealt to them.
//!
//! A product is cut along the weight rows into chunks of some hundred kilobytes, which threads claim one by one; each
//! chunk serves all rows of the step while it lies in the cache. Sums never cross a chunk, so neither the cut nor the
//! thread shows in a result.

use std::sync::atomic::{AtomicPtr, Ordering};

use super::Projection;
use crate::kernels::linear::{PAD, PANEL_ELEMENTS, Product};
use crate::kernels::{KernelError, KernelSet, Ops};
use crate::numerics;
use crate::threads::{ThreadError, ThreadPool};
use crate::weights::Tensor;

/// Weight bytes in a chunk: half of a small L2 cache, and still some microseconds of work.
const CHUNK_BYTES: usize = 256 << 10;

/// Weight rows in a chunk at most: bounds each thread's tile.
const COLUMNS_MAX: usize = 64;

/// Activation rows that a chunk serves at once: 128 rows × 2048 elements × 2 bytes = half of a small L2 cache.
const ROW_BLOCK: usize = 128;

/// Kernels, threads and scratch of one compute device.
///
/// Scratch grows to the largest step seen (some tens of megabytes for [`ROWS_MAX`](super::ROWS_MAX) rows of an
/// 8B model) and is used again: a steady state does not allocate.
pub struct Cpu {
    pub(super) ops: &'static Ops,
    pub(super) threads: ThreadPool,
    pub(super) scratch: super::forward::Scratch,
    pub(super) local: Vec<Local>,
    /// Called after each layer of a step.
    pub(super) between_layers: Option<Box<dyn FnMut() + Send>>,
}

/// Why a CPU could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The kernels cannot run here.
    #[error(transparent)]
    Kernels(#[from] KernelError),
    /// The threads did not start.
    #[error(transparent)]
    Threads(#[from] ThreadError),
}

impl Cpu {
    /// Starts `threads` threads, the caller's included.
    ///
    /// # Errors
    /// If this machine cannot run the kernels, or refuses a thread.
    pub fn new(set: KernelSet, threads: usize) -> Result<Self, CpuError> {
        let ops = Ops::of(set)?;
        let threads = ThreadPool::new(threads)?;
        let local = (0..threads.threads()).map(|_| Local::new()).collect();
        Ok(Cpu { ops, threads, scratch: super::forward::Scratch::default(), local, between_layers: None })
    }

    /// The kernel set in use.
    pub fn kernels(&self) -> KernelSet {
        self.ops.set
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.threads.threads()
    }

    /// Its [numerics class](crate::numerics).
    pub fn numerics(&self) -> String {
        numerics::class(self.ops.set)
    }

    /// Has this called after each layer of a step, by the thread that makes it: a step may take long.
    pub fn between_layers(&mut self, call: Box<dyn FnMut() + Send>) {
        self.between_layers = Some(call);
    }

    /// The threads, for probes between steps.
    pub fn pool(&mut self) -> &mut ThreadPool {
        &mut self.threads
    }
}

/// A buffer that begins at a cache line: a load of a whole vector that crosses two lines costs twice.
#[derive(Default)]
struct Lines<T> {
    elements: Vec<T>,
    start: usize,
}

impl<T: Copy + Default> Lines<T> {
    const LINE: usize = 64;

    fn grow(&mut self, len: usize) {
        if self.get().len() < len {
            self.elements = vec![T::default(); len + Self::LINE / size_of::<T>()];
            self.start = self.elements.as_ptr().align_offset(Self::LINE);
        }
    }

    fn get(&self) -> &[T] {
        &self.elements[self.start..]
    }

    fn get_mut(&mut self) -> &mut [T] {
        &mut self.elements[self.start..]
    }
}

/// What one thread needs for itself.
pub(super) struct Local {
    panel: Lines<f32>,
    tile: Vec<f32>,
    second: Vec<f32>,
}

impl Local {
    fn new() -> Self {
        let tile = vec![0.0; ROW_BLOCK * COLUMNS_MAX];
        let mut panel = Lines::default();
        panel.grow(PANEL_ELEMENTS);
        Local { panel, second: tile.clone(), tile }
    }
}

/// Rows of activations as products read them: padded, in f32, and in bf16 if a kernel wants that.
#[derive(Default)]
pub(super) struct Activations {
    width: usize,
    stride: usize,
    rows: usize,
    bf16: bool,
    f32s: Lines<f32>,
    bf16s: Lines<u16>,
}

impl Activations {
    /// Makes room for rows of `width` elements, and sets the padding to zero.
    pub(super) fn shape(&mut self, rows: usize, width: usize, bf16: bool) {
        // A stride that is no power of two keeps rows out of one another's cache sets.
        let stride = width.next_multiple_of(PAD) + PAD;
        self.f32s.grow(rows * stride);
        for row in self.f32s.get_mut().chunks_exact_mut(stride).take(rows) {
            row[width..].fill(0.0);
        }
        if bf16 {
            self.bf16s.grow(rows * stride);
            for row in self.bf16s.get_mut().chunks_exact_mut(stride).take(rows) {
                row[width..].fill(0);
            }
        }
        (self.width, self.stride, self.rows, self.bf16) = (width, stride, rows, bf16);
    }

    /// Whoever writes rows from several threads.
    pub(super) fn writer(&mut self) -> Writer {
        Writer {
            f32s: Shared::new(self.f32s.get_mut().as_mut_ptr()),
            bf16s: Shared::new(self.bf16s.get_mut().as_mut_ptr()),
            width: self.width,
            stride: self.stride,
            bf16: self.bf16,
        }
    }
}

/// Rows of [`Activations`], written by several threads, each its own part.
pub(super) struct Writer {
    f32s: Shared<f32>,
    bf16s: Shared<u16>,
    width: usize,
    stride: usize,
    bf16: bool,
}

impl Writer {
    /// Part of a row.
    ///
    /// # Safety
    /// The row must exist in the activations, which must live and not be read meanwhile; no other thread may hold an
    /// overlapping part.
    #[expect(
        clippy::mut_from_ref,
        reason = "threads share the writer; disjoint parts are the caller's promise"
    )]
    pub(super) unsafe fn part(&self, row: usize, from: usize, len: usize) -> &mut [f32] {
        assert!(from + len <= self.width);
        // SAFETY: inside the row, promised to exist and be ours.
        unsafe { std::slice::from_raw_parts_mut(self.f32s.get().add(row * self.stride + from), len) }
    }

    /// Rounds what was written to a part, if bf16 is wanted.
    ///
    /// # Safety
    /// As for [`part`](Self::part).
    pub(super) unsafe fn finish(&self, ops: &Ops, row: usize, from: usize, len: usize) {
        if self.bf16 {
            // SAFETY: `shape` made both of one size; else as promised.
            let out = unsafe {
                std::slice::from_raw_parts_mut(self.bf16s.get().add(row * self.stride + from), len)
            };
            // SAFETY: as promised.
            ops.round_row(unsafe { self.part(row, from, len) }, out);
        }
    }
}

/// An address that several threads write through, each to its own elements.
pub(super) struct Shared<T>(AtomicPtr<T>);

impl<T> Shared<T> {
    pub(super) fn new(start: *mut T) -> Self {
        Shared(AtomicPtr::new(start))
    }

    pub(super) fn get(&self) -> *mut T {
        self.0.load(Ordering::Relaxed)
    }
}

/// Where a product's rows go: `[rows][stride]`, starting at the job's first weight row.
pub(super) struct Out {
    start: Shared<f32>,
    stride: usize,
    add: bool,
}

impl Out {
    /// Overwrites rows of `stride` elements.
    pub(super) fn put(to: &mut [f32], stride: usize) -> Self {
        Out { start: Shared::new(to.as_mut_ptr()), stride, add: false }
    }

    /// Adds to what is there.
    pub(super) fn add(to: &mut [f32], stride: usize) -> Self {
        Out { start: Shared::new(to.as_mut_ptr()), stride, add: true }
    }
}

/// One of the products that are dealt out together.
pub(super) struct Job<'a> {
    pub(super) projection: &'a Projection,
    pub(super) out: Out,
}

/// Weight rows in a chunk, so that chunks are large enough to stream and enough to go round.
fn columns_per_chunk(weight: &Tensor, threads: usize) -> usize {
    let (rows, row_bytes) = (weight.shape()[0], weight.shape()[1] * weight.dtype().bytes());
    let fit = CHUNK_BYTES / row_bytes.max(1);
    let fair = rows.div_ceil(4 * threads);
    fit.min(fair).clamp(4, COLUMNS_MAX) / 4 * 4
}

/// Everything about a product but its weight rows.
struct Task<'a> {
    ops: &'static Ops,
    input: &'a Activations,
}

impl Task<'_> {
    /// Weight rows `n0 .. n0 + columns` times activation rows `r0 .. r0 + rows`, with bias, into the tile.
    fn compute(
        &self,
        projection: &Projection,
        (n0, columns): (usize, usize),
        (r0, rows): (usize, usize),
        panel: &mut [f32],
        tile: &mut [f32],
    ) {
        let weight = &projection.weight;
        let k = weight.shape()[1];
        let row_bytes = k * weight.dtype().bytes();
        let bytes = &weight.bytes()[n0 * row_bytes..(n0 + columns) * row_bytes];
        assert!(k == self.input.width && r0 + rows <= self.input.rows && rows * columns <= tile.len());
        let at = r0 * self.input.stride;
        let product = Product {
            weights: bytes.as_ptr(),
            dtype: weight.dtype(),
            k,
            columns,
            x: self.input.f32s.get()[at..].as_ptr(),
            x_bf16: if self.input.bf16 { self.input.bf16s.get()[at..].as_ptr() } else { std::ptr::null() },
            x_stride: self.input.stride,
            rows,
            out: tile.as_mut_ptr(),
            panel: panel.as_mut_ptr(),
        };
        assert!(self.input.bf16 || !self.ops.wants_bf16(weight.dtype()));
        // SAFETY: the slices above cover the rows and columns, the assertions the rest; activations are padded.
        unsafe { self.ops.product(&product) };
        if let Some(bias) = &projection.bias {
            let mut wide = [0.0; COLUMNS_MAX];
            bias.widen(n0, &mut wide[..columns]);
            for row in tile[..rows * columns].chunks_exact_mut(columns) {
                row.iter_mut().zip(&wide).for_each(|(x, b)| *x += b);
            }
        }
    }
}

/// Products of the same activations with several weights, all chunks of all of them in one deal.
pub(super) fn products(
    ops: &'static Ops,
    threads: &mut ThreadPool,
    local: &mut [Local],
    input: &Activations,
    jobs: &[Job<'_>],
) {
    let task = Task { ops, input };
    let count = threads.threads();
    let plan: Vec<(usize, usize)> = jobs
        .iter()
        .map(|j| {
            let columns = columns_per_chunk(&j.projection.weight, count);
            (columns, j.projection.weight.shape()[0].div_ceil(columns))
        })
        .collect();
    let local = Shared::new(local.as_mut_ptr());
    let total = plan.iter().map(|p| p.1).sum();
    threads.run_many(total, |mut chunk, thread| {
        let mut which = 0;
        while chunk >= plan[which].1 {
            chunk -= plan[which].1;
            which += 1;
        }
        let job = &jobs[which];
        let n0 = chunk * plan[which].0;
        let columns = plan[which].0.min(job.projection.weight.shape()[0] - n0);
        // SAFETY: there is one `Local` for each thread, and a thread runs one chunk at a time.
        let local = unsafe { &mut *local.get().add(thread) };
        for r0 in (0..input.rows).step_by(ROW_BLOCK) {
            let rows = ROW_BLOCK.min(input.rows - r0);
            task.compute(job.projection, (n0, columns), (r0, rows), local.panel.get_mut(), &mut local.tile);
            for (i, tile) in local.tile[..rows * columns].chunks_exact(columns).enumerate() {
                // SAFETY: chunks are disjoint ranges of columns, and the output has a row for each activation row.
                let out = unsafe {
                    let start = job.out.start.get().add((r0 + i) * job.out.stride + n0);
                    std::slice::from_raw_parts_mut(start, columns)
                };
                if job.out.add {
                    out.iter_mut().zip(tile).for_each(|(o, t)| *o += t);
                } else {
                    out.copy_from_slice(tile);
                }
            }
        }
    });
}

/// `silu(gate) * up` of the same activations, into other activations.
pub(super) fn gated(
    ops: &'static Ops,
    threads: &mut ThreadPool,
    local: &mut [Local],
    input: &Activations,
    (gate, up): (&Projection, &Projection),
    out: &Writer,
) {
    let task = Task { ops, input };
    let columns = columns_per_chunk(&gate.weight, threads.threads());
    let width = gate.weight.shape()[0];
    let local = Shared::new(local.as_mut_ptr());
    threads.run_many(width.div_ceil(columns), |chunk, thread| {
        let n0 = chunk * columns;
        let columns = columns.min(width - n0);
        // SAFETY: there is one `Local` for each thread, and a thread runs one chunk at a time.
        let local = unsafe { &mut *local.get().add(thread) };
        for r0 in (0..input.rows).step_by(ROW_BLOCK) {
            let rows = ROW_BLOCK.min(input.rows - r0);
            task.compute(gate, (n0, columns), (r0, rows), local.panel.get_mut(), &mut local.tile);
            task.compute(up, (n0, columns), (r0, rows), local.panel.get_mut(), &mut local.second);
            for i in 0..rows {
                let at = i * columns..(i + 1) * columns;
                // SAFETY: chunks are disjoint ranges of columns; the output was shaped for the same rows.
                unsafe {
                    ops.gate(&local.tile[at.clone()], &local.second[at], out.part(r0 + i, n0, columns));
                    out.finish(ops, r0 + i, n0, columns);
                }
            }
        }
    });
}
