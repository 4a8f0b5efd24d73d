//! One step of a model: rows in, logits out. Prefill, a chunk of a prefill, decode and replay are all this one call.
//!
//! ```text
//! embed → for each layer: norm → q k v → (norm) rotate, write KV → attention → o, add → norm → gate up → down, add
//!       → rows that want logits: norm → head
//! ```
//!
//! Invariants: a row's logits are a function of its sequence's tokens up to it, bit for bit, whatever else is in the
//! step and however the sequence was cut into steps. A step that fails has changed nothing.

use super::compute::{Activations, Cpu, Job, Out, Shared, gated, products};
use super::{Layer, Model, Projection, rope};
use crate::kernels::attention::{Attention, QUERIES_MAX, Query};
use crate::kernels::pointwise::to_bf16;
use crate::kv::{KvPages, OutOfPages, PAGE_TOKENS, PageAddress, SeqId};
use crate::weights::Tensor;

/// Rows in one step at most. Bounds the scratch: an 8B model takes about 150 KB for each.
pub const ROWS_MAX: usize = 512;

/// Rows of one sequence that share a task of attention.
const ATTENTION_ROWS: usize = 8;

/// One token of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Whose.
    pub seq: SeqId,
    /// Its place in the sequence, from 0: the next after what the sequence holds, or after the row before it.
    pub position: u32,
    /// The token.
    pub token: u32,
    /// Whether the logits after it are wanted.
    pub wants_logits: bool,
}

/// Why a step was not made. Nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Not enough free pages for the rows.
    #[error(transparent)]
    Pages(#[from] OutOfPages),
    /// A token that the model does not have.
    #[error("row {row}: token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// Its place among the rows.
        row: usize,
        /// The token.
        token: u32,
        /// Tokens are below this.
        vocab: usize,
    },
    /// A row whose position is not the sequence's next.
    #[error("row {row} has position {found}, but its sequence's next is {next:?}")]
    Position {
        /// Its place among the rows.
        row: usize,
        /// What the row says.
        found: u32,
        /// What it should be; none if the sequence is closed.
        next: Option<usize>,
    },
    /// More rows than fit one step.
    #[error("{rows} rows in one step; at most {ROWS_MAX}")]
    Rows {
        /// How many.
        rows: usize,
    },
    /// The pages are of another model's shape.
    #[error("the KV pages were laid out for another model")]
    Layout,
}

/// Logits of the rows that wanted them, in their order.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    values: &'a [f32],
    vocab: usize,
}

impl<'a> Logits<'a> {
    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.values.len() / self.vocab
    }

    /// `vocab` logits of the `i`-th row that wanted them.
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.values[i * self.vocab..(i + 1) * self.vocab]
    }

    /// All rows in order.
    pub fn iter(&self) -> impl Iterator<Item = &'a [f32]> {
        self.values.chunks_exact(self.vocab)
    }
}

/// Buffers of a step, kept for the next.
#[derive(Default)]
pub(super) struct Scratch {
    places: Vec<Place>,
    addresses: Vec<PageAddress>,
    runs: Vec<Run>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    hidden: Vec<f32>,
    normed: Activations,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Activations,
    inner: Activations,
    norm: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    logits: Vec<f32>,
}

/// A row's position and where its sequence's pages begin among the addresses.
#[derive(Clone, Copy)]
struct Place {
    position: usize,
    pages: usize,
}

/// Neighbouring rows of one sequence, at most [`ATTENTION_ROWS`].
#[derive(Clone, Copy)]
struct Run {
    first: usize,
    rows: usize,
}

impl Cpu {
    /// Runs `rows` through the model: writes their keys and values, and gives the logits of those that want them.
    ///
    /// Rows of one sequence stand in order of position, without a gap, and beside one another; pages that they need
    /// are reserved here.
    ///
    /// # Errors
    /// See [`StepError`]; then nothing has changed (pages reserved on the way aside, which stay the sequence's).
    pub fn step<'a>(
        &'a mut self,
        model: &Model,
        kv: &mut KvPages,
        rows: &[Row],
    ) -> Result<Logits<'a>, StepError> {
        let config = &model.config;
        check(model, kv, rows)?;
        let ends = reserve(kv, rows)?;
        self.lay_out(kv, rows);
        self.embed(model, rows);
        for (index, layer) in model.layers.iter().enumerate() {
            self.attention(model, layer, index, kv);
            self.feed_forward(model, layer);
            if let Some(call) = &mut self.between_layers {
                call();
            }
        }
        for (seq, end) in ends {
            kv.advance(seq, end);
        }
        self.head(model, rows);
        let wanted = rows.iter().filter(|r| r.wants_logits).count();
        Ok(Logits { values: &self.scratch.logits[..wanted * config.vocab], vocab: config.vocab })
    }

    fn lay_out(&mut self, kv: &KvPages, rows: &[Row]) {
        let s = &mut self.scratch;
        s.places.clear();
        s.addresses.clear();
        s.runs.clear();
        for (i, row) in rows.iter().enumerate() {
            let follows = i > 0 && rows[i - 1].seq == row.seq;
            let pages = if follows { s.places[i - 1].pages } else { s.addresses.len() };
            if !follows {
                kv.addresses(row.seq, &mut s.addresses);
            }
            s.places.push(Place { position: row.position as usize, pages });
            match s.runs.last_mut() {
                Some(run) if follows && run.rows < ATTENTION_ROWS => run.rows += 1,
                _ => s.runs.push(Run { first: i, rows: 1 }),
            }
        }
    }

    fn embed(&mut self, model: &Model, rows: &[Row]) {
        let (hidden, half) = (model.config.hidden, model.config.head_dim / 2);
        let s = &mut self.scratch;
        grow(&mut s.hidden, rows.len() * hidden);
        grow(&mut s.cos, rows.len() * half);
        grow(&mut s.sin, rows.len() * half);
        for (i, row) in rows.iter().enumerate() {
            model.embedding.widen(row.token as usize * hidden, &mut s.hidden[i * hidden..(i + 1) * hidden]);
            let at = i * half..(i + 1) * half;
            rope::angles(&model.frequencies, row.position, &mut s.cos[at.clone()], &mut s.sin[at]);
        }
    }

    /// Norms `rows` of the residual stream into `normed`, for products with `weights`.
    fn norm(&mut self, model: &Model, norm: &Tensor, count: usize, next: &[&Projection]) {
        let (hidden, eps, ops) = (model.config.hidden, model.config.norm_eps, self.ops);
        let s = &mut self.scratch;
        grow(&mut s.norm, hidden);
        norm.widen(0, &mut s.norm[..hidden]);
        let bf16 = next.iter().any(|p| ops.wants_bf16(p.weight.dtype()));
        s.normed.shape(count, hidden, bf16);
        let (out, weight, x) = (s.normed.writer(), &s.norm[..hidden], &s.hidden);
        by_rows(&mut self.threads, count, |row| {
            // SAFETY: each row is one call's, and `normed` was shaped for `count` rows.
            unsafe {
                ops.rms_norm(&x[row * hidden..(row + 1) * hidden], weight, eps, out.part(row, 0, hidden));
                out.finish(ops, row, 0, hidden);
            }
        });
    }

    fn attention(&mut self, model: &Model, layer: &Layer, index: usize, kv: &mut KvPages) {
        let config = &model.config;
        let count = self.scratch.places.len();
        let (q_width, kv_width) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        self.norm(model, &layer.input_norm, count, &[&layer.q, &layer.k, &layer.v]);
        let s = &mut self.scratch;
        grow(&mut s.q, count * q_width);
        grow(&mut s.k, count * kv_width);
        grow(&mut s.v, count * kv_width);
        let jobs = [
            Job { projection: &layer.q, out: Out::put(&mut s.q, q_width) },
            Job { projection: &layer.k, out: Out::put(&mut s.k, kv_width) },
            Job { projection: &layer.v, out: Out::put(&mut s.v, kv_width) },
        ];
        products(self.ops, &mut self.threads, &mut self.local, &s.normed, &jobs);
        self.place_keys(model, layer, index, kv);
        self.attend(model, layer, index, kv);
        let s = &mut self.scratch;
        let jobs = [Job { projection: &layer.o, out: Out::add(&mut s.hidden, config.hidden) }];
        products(self.ops, &mut self.threads, &mut self.local, &s.attended, &jobs);
    }

    /// Norms (where the family does), rotates and scales q; norms, rotates and writes k; writes v.
    fn place_keys(&mut self, model: &Model, layer: &Layer, index: usize, kv: &mut KvPages) {
        let (config, layout, ops) = (&model.config, kv.layout(), self.ops);
        let (dim, half) = (config.head_dim, config.head_dim / 2);
        let (q_width, kv_width) = (config.heads * dim, config.kv_heads * dim);
        let s = &mut self.scratch;
        let q_norm = widened(layer.q_norm.as_ref(), &mut s.q_norm);
        let k_norm = widened(layer.k_norm.as_ref(), &mut s.k_norm);
        let (q, k, v) = (Shared::new(s.q.as_mut_ptr()), Shared::new(s.k.as_mut_ptr()), &s.v);
        let (places, addresses, cos, sin) = (&s.places, &s.addresses, &s.cos, &s.sin);
        let scale = 1.0 / (dim as f32).sqrt();
        by_rows(&mut self.threads, places.len(), |row| {
            let Place { position, pages } = places[row];
            let (cos, sin) = (&cos[row * half..(row + 1) * half], &sin[row * half..(row + 1) * half]);
            let turn = |head: &mut [f32], norm: Option<&[f32]>| {
                if let Some(norm) = norm {
                    let mut copy = [0.0; 512];
                    copy[..dim].copy_from_slice(head);
                    ops.rms_norm(&copy[..dim], norm, config.norm_eps, head);
                }
                ops.rotate(head, cos, sin);
            };
            // SAFETY: each row of q and k is one call's.
            let (q, k) = unsafe {
                (
                    std::slice::from_raw_parts_mut(q.get().add(row * q_width), q_width),
                    std::slice::from_raw_parts_mut(k.get().add(row * kv_width), kv_width),
                )
            };
            for head in q.chunks_exact_mut(dim) {
                turn(head, q_norm);
                head.iter_mut().for_each(|x| *x *= scale);
            }
            let page = addresses[pages + position / PAGE_TOKENS].get();
            let slot = position % PAGE_TOKENS;
            for (h, head) in k.chunks_exact_mut(dim).enumerate() {
                turn(head, k_norm);
                let value = &v[row * kv_width + h * dim..][..dim];
                for d in 0..dim {
                    // SAFETY: the offsets lie in the page by its layout; slots of different rows are different
                    // elements, since a sequence has one row for a position and a page one sequence.
                    unsafe {
                        *page.add(layout.keys(index, h) + d * PAGE_TOKENS + slot) = to_bf16(head[d]);
                        *page.add(layout.values(index, h) + slot * dim + d) = to_bf16(value[d]);
                    }
                }
            }
        });
    }

    /// Attention of all rows: a task is some rows of one sequence and one key/value head.
    fn attend(&mut self, model: &Model, layer: &Layer, index: usize, kv: &KvPages) {
        let (config, layout, ops) = (&model.config, kv.layout(), self.ops);
        let (dim, group) = (config.head_dim, config.heads / config.kv_heads);
        let q_width = config.heads * dim;
        let s = &mut self.scratch;
        let bf16 = ops.wants_bf16(layer.o.weight.dtype());
        s.attended.shape(s.places.len(), q_width, bf16);
        let (out, q, places, runs, addresses) = (s.attended.writer(), &s.q, &s.places, &s.runs, &s.addresses);
        self.threads.run_many(runs.len() * config.kv_heads, |task, _| {
            let (run, head) = (runs[task / config.kv_heads], task % config.kv_heads);
            let pages = &addresses[places[run.first].pages..];
            let mut tile = [const { None }; QUERIES_MAX];
            let mut filled = 0;
            let total = run.rows * group;
            for i in 0..total {
                let (row, at) = (run.first + i / group, (head * group + i % group) * dim);
                let to = places[row].position + 1;
                let from = layer.window.map_or(0, |w| to.saturating_sub(w as usize));
                // SAFETY: each head of each row is one task's; `attended` was shaped for these rows.
                let result = unsafe { out.part(row, at, dim) };
                tile[filled] = Some(Query {
                    q: q[row * q_width + at..][..dim].as_ptr(),
                    out: result.as_mut_ptr(),
                    from,
                    to,
                });
                filled += 1;
                if filled == QUERIES_MAX || i + 1 == total {
                    let queries: [Query; QUERIES_MAX] =
                        tile.map(|q| q.or(tile[0]).expect("the first is filled"));
                    let attention = Attention {
                        queries: &queries[..filled],
                        pages,
                        keys: layout.keys(index, head),
                        values: layout.values(index, head),
                        head_dim: dim,
                    };
                    // SAFETY: pages were reserved up to every position, and positions up to each row's are written.
                    unsafe { ops.attend(&attention) };
                    filled = 0;
                }
            }
            for row in run.first..run.first + run.rows {
                // SAFETY: as above: these heads of these rows are this task's.
                unsafe { out.finish(ops, row, head * group * dim, group * dim) };
            }
        });
    }

    fn feed_forward(&mut self, model: &Model, layer: &Layer) {
        let config = &model.config;
        let count = self.scratch.places.len();
        self.norm(model, &layer.mlp_norm, count, &[&layer.gate, &layer.up]);
        let s = &mut self.scratch;
        s.inner.shape(count, config.intermediate, self.ops.wants_bf16(layer.down.weight.dtype()));
        let out = s.inner.writer();
        gated(self.ops, &mut self.threads, &mut self.local, &s.normed, (&layer.gate, &layer.up), &out);
        let jobs = [Job { projection: &layer.down, out: Out::add(&mut s.hidden, config.hidden) }];
        products(self.ops, &mut self.threads, &mut self.local, &s.inner, &jobs);
    }

    fn head(&mut self, model: &Model, rows: &[Row]) {
        let (hidden, vocab) = (model.config.hidden, model.config.vocab);
        let mut count = 0;
        for (i, _) in rows.iter().enumerate().filter(|(_, r)| r.wants_logits) {
            self.scratch.hidden.copy_within(i * hidden..(i + 1) * hidden, count * hidden);
            count += 1;
        }
        if count == 0 {
            return;
        }
        let head = Projection { weight: model.head.clone(), bias: None };
        self.norm(model, &model.norm, count, &[&head]);
        let s = &mut self.scratch;
        grow(&mut s.logits, count * vocab);
        let jobs = [Job { projection: &head, out: Out::put(&mut s.logits, vocab) }];
        products(self.ops, &mut self.threads, &mut self.local, &s.normed, &jobs);
    }
}

fn check(model: &Model, kv: &KvPages, rows: &[Row]) -> Result<(), StepError> {
    if kv.layout() != crate::kv::KvLayout::of(&model.config) {
        return Err(StepError::Layout);
    }
    if rows.len() > ROWS_MAX {
        return Err(StepError::Rows { rows: rows.len() });
    }
    for (i, row) in rows.iter().enumerate() {
        if row.token as usize >= model.config.vocab {
            return Err(StepError::Token { row: i, token: row.token, vocab: model.config.vocab });
        }
        let next = match i.checked_sub(1).map(|p| rows[p]) {
            Some(before) if before.seq == row.seq => Some(before.position as usize + 1),
            // A sequence that comes back after another one in between would have two next positions.
            _ if rows[..i].iter().any(|r| r.seq == row.seq) => None,
            _ => kv.len(row.seq),
        };
        if next != Some(row.position as usize) {
            return Err(StepError::Position { row: i, found: row.position, next });
        }
    }
    Ok(())
}

/// Reserves pages for all rows; gives each sequence's new length.
fn reserve(kv: &mut KvPages, rows: &[Row]) -> Result<Vec<(SeqId, usize)>, StepError> {
    let mut ends: Vec<(SeqId, usize)> = Vec::new();
    for row in rows {
        match ends.last_mut() {
            Some((seq, end)) if *seq == row.seq => *end = row.position as usize + 1,
            _ => ends.push((row.seq, row.position as usize + 1)),
        }
    }
    let wanted: usize = ends.iter().map(|(seq, end)| kv.pages_wanted(*seq, *end)).sum();
    if wanted > kv.pages_free() {
        return Err(OutOfPages { wanted, free: kv.pages_free(), total: kv.pages_total() }.into());
    }
    for (seq, end) in &ends {
        kv.reserve(*seq, *end)?;
    }
    Ok(ends)
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

fn widened<'a>(norm: Option<&Tensor>, buffer: &'a mut Vec<f32>) -> Option<&'a [f32]> {
    let norm = norm?;
    grow(buffer, norm.shape()[0]);
    norm.widen(0, buffer);
    Some(buffer)
}

/// Calls `work` for each row; a few rows are not worth waking anybody.
fn by_rows(threads: &mut crate::threads::ThreadPool, rows: usize, work: impl Fn(usize) + Sync) {
    const TOGETHER: usize = 8;
    threads.run(rows.div_ceil(TOGETHER), |chunk, _| {
        (chunk * TOGETHER..rows.min((chunk + 1) * TOGETHER)).for_each(&work);
    });
}
