//! Element types of safetensors.

use std::fmt;

use serde::{Deserialize, Serialize};

/// An element type, named as the format names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(non_camel_case_types, reason = "the format's own names")]
#[expect(missing_docs, reason = "the names say it: kind, bits, exponent and mantissa")]
pub enum Dtype {
    BOOL,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    BF16,
    F32,
    F64,
    C64,
    F8_E4M3,
    F8_E5M2,
    F8_E8M0,
    F8_E4M3FNUZ,
    F8_E5M2FNUZ,
    F6_E2M3,
    F6_E3M2,
    F4,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Dtype; 22] = [
        Dtype::BOOL,
        Dtype::U8,
        Dtype::I8,
        Dtype::U16,
        Dtype::I16,
        Dtype::U32,
        Dtype::I32,
        Dtype::U64,
        Dtype::I64,
        Dtype::F16,
        Dtype::BF16,
        Dtype::F32,
        Dtype::F64,
        Dtype::C64,
        Dtype::F8_E4M3,
        Dtype::F8_E5M2,
        Dtype::F8_E8M0,
        Dtype::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ,
        Dtype::F6_E2M3,
        Dtype::F6_E3M2,
        Dtype::F4,
    ];

    /// Bits of one element; elements of less than a byte are packed.
    pub const fn bits(self) -> u64 {
        match self {
            Dtype::F4 => 4,
            Dtype::F6_E2M3 | Dtype::F6_E3M2 => 6,
            Dtype::BOOL
            | Dtype::U8
            | Dtype::I8
            | Dtype::F8_E4M3
            | Dtype::F8_E5M2
            | Dtype::F8_E8M0
            | Dtype::F8_E4M3FNUZ
            | Dtype::F8_E5M2FNUZ => 8,
            Dtype::U16 | Dtype::I16 | Dtype::F16 | Dtype::BF16 => 16,
            Dtype::U32 | Dtype::I32 | Dtype::F32 => 32,
            Dtype::U64 | Dtype::I64 | Dtype::F64 | Dtype::C64 => 64,
        }
    }

    /// Bytes of a tensor of this type; none if that overflows or is not a whole number.
    pub fn bytes_of(self, shape: &[u64]) -> Option<u64> {
        // A zero anywhere makes it empty, even where the other dimensions alone would overflow: as the format's own
        // reader, multiply in order and refuse the overflow.
        let mut elements = 1u64;
        for &dim in shape {
            elements = elements.checked_mul(dim)?;
        }
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
