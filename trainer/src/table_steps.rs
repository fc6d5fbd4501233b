//! Training steps of tables without the dense part of a model, for measurements.

use std::sync::Arc;

use onefold_ikjt::{Batch, BatchParts, Group};
use onefold_sharding::FeatureConfig;
use tch::Tensor;

use crate::Result;
use crate::config::TableOptimizerConfig;
use crate::device::Accelerator;
use crate::embedding::{
    DeviceGradients, DeviceLookup, Embeddings, FeatureLookup, Lookup, LookupGradients, Lookups, Placement,
    Request, Status,
};

/// The value of all gradients. They would come from the dense part.
const GRADIENT: f32 = 0.001;

/// The tables of a rank in main memory, and the batch that its steps look up.
#[derive(Debug)]
pub struct TableSteps {
    embeddings: Embeddings,
    groups: Vec<Group>,
    optimizer: TableOptimizerConfig,
    /// Empty before the first step.
    gradients: Vec<LookupGradients>,
}

impl TableSteps {
    /// Creates the shards of `placement` that are on this rank, with constant weights. A step looks up one
    /// group of `groups` for each feature.
    pub fn new(
        features: &[FeatureConfig],
        groups: Vec<Group>,
        placement: &Placement,
        optimizer: TableOptimizerConfig,
        threads: Arc<rayon::ThreadPool>,
    ) -> Self {
        let embeddings = Embeddings::alike(features, placement, &optimizer, threads);
        Self { embeddings, groups, optimizer, gradients: Vec::new() }
    }

    /// Requests the rows of a step. Every rank must call it.
    ///
    /// # Errors
    ///
    /// The errors of all collective operations.
    pub fn request(&self) -> Result<Request> {
        self.embeddings.request(&self.groups, Status::default())
    }

    /// Takes a step: answers `request`, sends the request of the next step, which it returns, sends gradients, and
    /// updates the tables. Every rank must call it.
    ///
    /// # Errors
    ///
    /// The errors of all collective operations.
    pub fn step(&mut self, request: Request) -> Result<Request> {
        let lookups = self.embeddings.host()?.lookup(request)?;
        let mut next = self.request()?;
        self.embeddings.statuses(&mut next)?;
        if self.gradients.is_empty() {
            self.gradients = all_gradients(&lookups, self.embeddings.features());
        }
        let sent = self.embeddings.host()?.send_gradients(&lookups, &self.gradients)?;
        self.embeddings.update(&lookups, &self.gradients, sent, &self.optimizer)?;
        Ok(next)
    }
}

fn all_gradients(lookups: &Lookups, features: &[FeatureConfig]) -> Vec<LookupGradients> {
    let of_values = |sequence: &FeatureLookup| {
        vec![GRADIENT; sequence.table_rows.len() * features[sequence.feature].dim as usize]
    };
    let gradient = |lookup: &Lookup| LookupGradients {
        pooled: vec![GRADIENT; lookup.pooled.len()],
        sequences: lookup.sequences.iter().map(of_values).collect(),
    };
    lookups.groups.iter().map(gradient).collect()
}

/// All tables on a device, and the batch that its steps look up.
#[derive(Debug)]
pub struct DeviceTableSteps {
    accelerator: Accelerator,
    parts: Vec<Part>,
    optimizer: TableOptimizerConfig,
}

/// The tables of one dimension on a device, which has one array per dimension.
#[derive(Debug)]
struct Part {
    embeddings: Embeddings,
    batch: Batch,
}

impl DeviceTableSteps {
    /// Creates the tables of `features`. A step looks up one group of `groups` for each feature.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Fault`] if the device has too little memory or fails; [`crate::Error::Io`] if threads cannot be
    /// started.
    pub fn new(
        accelerator: &Accelerator,
        features: &[FeatureConfig],
        groups: &[Group],
        optimizer: TableOptimizerConfig,
        threads: usize,
    ) -> Result<Self> {
        let mut dims: Vec<u64> = features.iter().map(|feature| feature.dim).collect();
        dims.sort_unstable();
        dims.dedup();
        let part = |dim: &u64| {
            let of_dim = features.iter().zip(groups).filter(|(feature, _)| feature.dim == *dim);
            let (configs, groups): (Vec<_>, Vec<_>) =
                of_dim.map(|(config, group)| (config.clone(), group.clone())).unzip();
            let placement = Placement::alone(&configs);
            let embeddings =
                Embeddings::on_accelerator(accelerator, &configs, &placement, &optimizer, 0, threads)?;
            // Only the looked-up rows matter, not how many samples share them.
            let size = groups.iter().map(Group::samples).max().unwrap_or(0);
            let parts = BatchParts {
                size,
                dense: Vec::new().into(),
                labels: Vec::new().into(),
                weights: None,
                timestamps: None,
                kept: Vec::new(),
                groups: groups.into_iter().map(|group| for_samples(group, size)).collect::<Result<_>>()?,
            };
            Ok(Part { embeddings, batch: Batch::try_new(parts)? })
        };
        let parts = dims.iter().map(part).collect::<Result<_>>()?;
        Ok(Self { accelerator: accelerator.clone(), parts, optimizer })
    }

    /// Takes a step. Calls `timed` with each of its two parts: the lookup, and the update of the tables. The
    /// batch is copied to the device before, since training overlaps the copy with the previous step.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Fault`] if the device fails; the errors of `timed`.
    pub fn step(
        &mut self,
        mut timed: impl FnMut(&mut dyn FnMut() -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let Self { accelerator, parts, optimizer } = self;
        let request = |part: &Part| part.embeddings.request_batch(Some(&part.batch), Status::default());
        let mut requests = parts.iter().map(request).collect::<Result<Vec<_>>>()?;
        accelerator.synchronize()?;
        let mut lookups = Vec::with_capacity(parts.len());
        timed(&mut || {
            for (part, request) in parts.iter().zip(requests.drain(..)) {
                lookups.push(part.embeddings.device()?.lookup(request)?);
            }
            accelerator.synchronize()
        })?;
        let gradients: Vec<_> = lookups.iter().map(device_gradients).collect();
        accelerator.synchronize()?;
        timed(&mut || {
            for ((part, lookup), gradients) in parts.iter_mut().zip(&lookups).zip(&gradients) {
                let sent = part.embeddings.device()?.send_gradients(lookup, gradients)?;
                part.embeddings.update_on_device(lookup, gradients, sent, (optimizer, None))?;
            }
            accelerator.synchronize()
        })
    }
}

/// Returns the group with `samples` samples, like the other groups of the batch; its rows do not change.
fn for_samples(group: Group, samples: usize) -> Result<Group> {
    let rows = group.rows();
    if rows == samples {
        return Ok(group);
    }
    let inverse: Vec<i32> = (0..samples).map(|sample| (sample % rows.max(1)) as i32).collect();
    let name = group.name().to_owned();
    Ok(Group::try_new(name, Some(inverse.into()), group.features().to_vec())?)
}

fn device_gradients(lookup: &DeviceLookup) -> DeviceGradients {
    let filled = |tensor: &Tensor| Tensor::full_like(tensor, f64::from(GRADIENT));
    let looked_up = &lookup.looked_up;
    DeviceGradients {
        pooled: looked_up.pooled.as_ref().map(filled),
        sequences: looked_up.sequences.as_ref().map(filled),
    }
}

#[cfg(test)]
mod tests {
    use onefold_ikjt::Feature;
    use onefold_sharding::{DataType, IdPolicy, Pooling, TableOptimizer};

    use super::*;
    use crate::device::tests::host::emulated;

    /// Tables of several dimensions, pooled and not, take steps in memory and on a device.
    #[test]
    fn tables_take_steps_in_memory_and_on_a_device() {
        let feature = |(name, dim, pooling): (&str, u64, Pooling)| FeatureConfig {
            feature: name.to_owned(),
            table: None,
            rows: 20,
            dim,
            pooling,
            target: None,
            ids: IdPolicy::Checked,
            dtype: DataType::Fp32,
        };
        let features = [("a", 4, Pooling::Sum), ("b", 4, Pooling::Attention), ("c", 8, Pooling::Mean)];
        let features = features.map(feature);
        let group = |(name, lists): (&str, &[Vec<i64>])| {
            Group::try_new(name, None, vec![Feature::from_rows(name, lists).unwrap()]).unwrap()
        };
        let lists = [vec![1, 2], vec![3], vec![19, 1, 1]];
        let groups = [("a", &lists[..]), ("b", &lists[..2]), ("c", &lists[..])].map(group).to_vec();
        let optimizer = TableOptimizerConfig::new(TableOptimizer::Adagrad, 0.01);
        let threads = Arc::new(crate::embedding::thread_pool(1).unwrap());
        let placement = Placement::alone(&features);
        let mut in_memory =
            TableSteps::new(&features, groups.clone(), &placement, optimizer.clone(), threads);
        let mut request = in_memory.request().unwrap();
        let mut on_device = DeviceTableSteps::new(&emulated(), &features, &groups, optimizer, 1).unwrap();
        assert_eq!(on_device.parts.len(), 2, "there are two dimensions");
        for step in 1..=3 {
            request = in_memory.step(request).unwrap();
            let mut parts = 0;
            on_device
                .step(|part| {
                    parts += 1;
                    part()
                })
                .unwrap();
            assert_eq!((in_memory.embeddings.steps(), parts), (step, 2));
            assert!(on_device.parts.iter().all(|part| part.embeddings.steps() == step));
        }
    }
}
