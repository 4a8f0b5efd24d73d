//! Weights: tensor names over bytes that somebody else owns.
//!
//! A tensor is a range of an owner's bytes (a mapped file of the pool, a `Vec` in a test), kept alive by an [`Arc`].
//! Nothing is copied, converted or even read here: a view may be made before its bytes are resident, and the first
//! read happens in a step of the model.
//!
//! Invariants: a view's byte length is its shape times its element size; ranges lie inside their owner. Any alignment
//! is fine: the kernels load unaligned, because safetensors promises none.
//!
//! It deliberately does **not** parse or map files: the loader does, and gives a header and an owner.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use pilotlight_loader::mapping::FileMap;
use pilotlight_loader::safetensors::Header;

/// Whoever keeps weight bytes alive and in place. `as_ref` must give the same bytes at the same address every time.
pub type WeightOwner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A mapped file of the pool as an owner.
pub fn mapped(file: FileMap) -> WeightOwner {
    struct Mapped(FileMap);
    impl AsRef<[u8]> for Mapped {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    Arc::new(Mapped(file))
}

/// Element types that the engine computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// The upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

impl WeightDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            WeightDtype::Bf16 | WeightDtype::F16 => 2,
            WeightDtype::F32 => 4,
        }
    }

    /// From safetensors' name (`BF16`); `None` if the engine cannot compute with it.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        match name {
            "BF16" => Some(WeightDtype::Bf16),
            "F16" => Some(WeightDtype::F16),
            "F32" => Some(WeightDtype::F32),
            _ => None,
        }
    }
}

/// Why a tensor cannot be used. Every variant names the tensor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// The model needs it and the checkpoint has none of that name.
    #[error(
        "tensor `{name}` is missing from the checkpoint; is it complete and of the architecture its config.json says?"
    )]
    Missing {
        /// Its name.
        name: String,
    },
    /// The config says another shape.
    #[error("tensor `{name}` has shape {found:?}, but config.json makes it {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// As in the checkpoint.
        found: Vec<usize>,
        /// As the config wants it.
        expected: Vec<usize>,
    },
    /// Elements of a kind that the engine cannot compute with.
    #[error(
        "tensor `{name}` has dtype {dtype}; this engine computes with BF16, F16 and F32: convert the checkpoint"
    )]
    Dtype {
        /// Its name.
        name: String,
        /// safetensors' name of the dtype.
        dtype: String,
    },
    /// Its bytes do not fit its shape, or lie outside the file.
    #[error("tensor `{name}`: bytes {range:?} do not hold shape {shape:?} inside {available} bytes")]
    Bytes {
        /// Its name.
        name: String,
        /// Where it should lie.
        range: Range<usize>,
        /// Its shape.
        shape: Vec<usize>,
        /// How many bytes there are.
        available: usize,
    },
    /// Two tensors of one name.
    #[error("tensor `{name}` appears twice in the checkpoint")]
    Twice {
        /// Its name.
        name: String,
    },
}

/// One tensor, row-major, in place.
#[derive(Clone)]
pub struct Tensor {
    dtype: WeightDtype,
    shape: Vec<usize>,
    owner: WeightOwner,
    range: Range<usize>,
}

impl Tensor {
    /// Element type.
    pub fn dtype(&self) -> WeightDtype {
        self.dtype
    }

    /// Dimensions, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its bytes, where they are. Little-endian, any alignment.
    pub fn bytes(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    /// Writes elements `start..start + out.len()`, widened to f32.
    pub fn widen(&self, start: usize, out: &mut [f32]) {
        let size = self.dtype.bytes();
        let bytes = &self.bytes()[start * size..(start + out.len()) * size];
        match self.dtype {
            WeightDtype::Bf16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
                }
            }
            WeightDtype::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
            WeightDtype::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({:?} {:?} at {:?})", self.dtype, self.shape, self.range)
    }
}

/// All tensors of a checkpoint, by name. Tensors that no model asks for may be in it.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    tensors: BTreeMap<String, Tensor>,
    /// Named for the error message, should a model ask for one.
    unsupported: BTreeMap<String, String>,
}

impl Weights {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor that lies at `range` of `owner`'s bytes.
    ///
    /// `dtype` is safetensors' name; one that the engine does not compute with is an error only once a model asks for
    /// this very tensor.
    ///
    /// # Errors
    /// If the range does not hold the shape, lies outside the owner, or the name was there before.
    pub fn insert(
        &mut self,
        name: &str,
        dtype: &str,
        shape: &[usize],
        owner: &WeightOwner,
        range: Range<usize>,
    ) -> Result<(), WeightError> {
        if self.tensors.contains_key(name) || self.unsupported.contains_key(name) {
            return Err(WeightError::Twice { name: name.into() });
        }
        let Some(dtype) = WeightDtype::from_safetensors(dtype) else {
            self.unsupported.insert(name.into(), dtype.into());
            return Ok(());
        };
        let available = (**owner).as_ref().len();
        let wanted = shape.iter().try_fold(dtype.bytes(), |n, d| n.checked_mul(*d));
        if range.start > range.end || range.end > available || wanted != Some(range.end - range.start) {
            return Err(WeightError::Bytes { name: name.into(), range, shape: shape.into(), available });
        }
        self.tensors.insert(name.into(), Tensor { dtype, shape: shape.into(), owner: owner.clone(), range });
        Ok(())
    }

    /// Adds all tensors of a safetensors file, whose whole bytes are `file`'s.
    ///
    /// # Errors
    /// As [`insert`](Self::insert), at the first tensor that does not fit.
    pub fn add_file(&mut self, header: &Header, file: &WeightOwner) -> Result<(), WeightError> {
        // What does not fit a usize cannot lie in mapped bytes: `insert` refuses the largest number.
        let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        for t in &header.tensors {
            let shape: Vec<usize> = t.shape.iter().map(|d| index(*d)).collect();
            let at = |offset: u64| index(header.data_start.saturating_add(offset));
            self.insert(&t.name, &t.dtype.to_string(), &shape, file, at(t.begin)..at(t.end))?;
        }
        Ok(())
    }

    /// The tensor of this name, if its shape is `expected`.
    ///
    /// # Errors
    /// If it is missing, of another shape, or of a dtype that the engine cannot compute with.
    pub fn get(&self, name: &str, expected: &[usize]) -> Result<Tensor, WeightError> {
        if let Some(dtype) = self.unsupported.get(name) {
            return Err(WeightError::Dtype { name: name.into(), dtype: dtype.clone() });
        }
        let tensor = self.tensors.get(name).ok_or_else(|| WeightError::Missing { name: name.into() })?;
        if tensor.shape != expected {
            return Err(WeightError::Shape {
                name: name.into(),
                found: tensor.shape.clone(),
                expected: expected.into(),
            });
        }
        Ok(tensor.clone())
    }

    /// Whether there is a tensor of this name, of whatever kind.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.unsupported.contains_key(name)
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len() + self.unsupported.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(bytes: &[u8]) -> WeightOwner {
        Arc::new(bytes.to_vec())
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let bytes = owner(&[0; 16]);
        let mut weights = Weights::new();
        for (shape, range) in
            [(&[4usize, 2][..], 0..15), (&[4, 4], 0..32), (&[usize::MAX, 4], 0..16), (&[1], 18..20)]
        {
            let error = weights.insert("w", "BF16", shape, &bytes, range).unwrap_err();
            assert!(
                matches!(error, WeightError::Bytes { .. }) && error.to_string().contains("`w`"),
                "{error}"
            );
        }
        weights.insert("w", "BF16", &[4, 2], &bytes, 0..16).unwrap();
        assert!(matches!(weights.insert("w", "F32", &[4], &bytes, 0..16), Err(WeightError::Twice { .. })));
        assert!(matches!(weights.get("v", &[1]), Err(WeightError::Missing { .. })));
        assert!(matches!(weights.get("w", &[2, 4]), Err(WeightError::Shape { .. })));
        weights.insert("q", "I8", &[16], &bytes, 0..16).unwrap();
        assert!(weights.get("q", &[16]).unwrap_err().to_string().contains("I8"));
    }

    #[test]
    fn elements_widen_exactly_at_any_alignment() {
        let values = [1.5f32, -0.0, 3.25e-5, -65504.0];
        let mut bytes = vec![9u8];
        for v in values {
            bytes.extend(half::f16::from_f32(v).to_le_bytes());
        }
        let owner: WeightOwner = Arc::new(bytes);
        let mut weights = Weights::new();
        weights.insert("w", "F16", &[4], &owner, 1..9).unwrap();
        let mut out = [0f32; 3];
        weights.get("w", &[4]).unwrap().widen(1, &mut out);
        assert_eq!(
            out.map(f32::to_bits),
            [values[1], values[2], values[3]].map(|v| half::f16::from_f32(v).to_f32().to_bits())
        );
    }
}
