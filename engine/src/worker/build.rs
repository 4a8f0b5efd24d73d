//! From mapped files to a model: headers, tensors, and that they are what `config.json` says.

use crate::model::{Model, ModelConfig};
use crate::weights::{WeightError, WeightOwner, Weights};
use pilotlight_loader::safetensors::{Header, HeaderError};

/// Why files are not a model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BuildError {
    /// A file is not safetensors.
    #[error("read the header of {file}")]
    Header {
        /// Its name.
        file: String,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// A tensor is not as it should be.
    #[error("use the tensors of {file}")]
    Tensor {
        /// The file.
        file: String,
        /// What is wrong.
        source: WeightError,
    },
    /// The model needs something else.
    #[error(transparent)]
    Model(#[from] WeightError),
}

/// A model over these files, by name. Their headers are read, so their bytes must be there.
pub(crate) fn model(config: ModelConfig, files: &[(String, WeightOwner)]) -> Result<Model, BuildError> {
    let mut weights = Weights::new();
    for (name, owner) in files {
        let bytes = (**owner).as_ref();
        let header = Header::parse(bytes, bytes.len() as u64)
            .map_err(|source| BuildError::Header { file: name.clone(), source })?;
        for tensor in &header.tensors {
            let shape: Vec<usize> = tensor.shape.iter().map(|extent| *extent as usize).collect();
            let at = |offset: u64| (header.data_start + offset) as usize;
            weights
                .insert(
                    &tensor.name,
                    &tensor.dtype.to_string(),
                    &shape,
                    owner,
                    at(tensor.begin)..at(tensor.end),
                )
                .map_err(|source| BuildError::Tensor { file: name.clone(), source })?;
        }
    }
    Ok(Model::new(config, &weights)?)
}
