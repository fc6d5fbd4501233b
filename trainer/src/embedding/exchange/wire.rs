//! Messages of vectors between ranks, in host memory.

use std::sync::atomic::AtomicU64;

use onefold_kernels::element::{Elements, nearest_bf16, nearest_fp16};
use onefold_kernels::fresh::fill_pieces;
use onefold_sharding::DataType;
use rayon::ThreadPool;
use rayon::prelude::*;
use tch::{Device, Tensor};

use super::Exchange;
use crate::distributed::Pending;
use crate::{Result, tensors};

/// 32-bit floats to be sent, by rank.
pub(super) struct Outgoing {
    /// No other handle to this tensor exists.
    values: Tensor,
    splits: Vec<i64>,
}

/// Vectors that are being received from all ranks.
#[derive(Debug)]
pub(in crate::embedding) struct Arriving {
    pending: Pending,
    vectors: Arrived,
}

/// Vectors from all ranks, in the type of the messages.
#[derive(Debug)]
pub(super) struct Arrived {
    /// No other handle to this tensor exists after the operation that writes it has ended.
    values: Tensor,
    dtype: DataType,
}

impl Outgoing {
    /// Allocates floats for every rank and block with these sizes, and fills them. `write` receives a rank, a block
    /// and its floats; it is called in parallel.
    pub(super) fn written(
        threads: &ThreadPool,
        sizes: &[Vec<usize>],
        write: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
    ) -> Self {
        let flat: Vec<usize> = sizes.iter().flatten().copied().collect();
        let numbers = sizes.iter().enumerate();
        let blocks: Vec<(usize, usize)> =
            numbers.flat_map(|(rank, sizes)| (0..sizes.len()).map(move |number| (rank, number))).collect();
        let values = tensors::written(&[flat.iter().sum::<usize>() as i64], |memory| {
            let write = |piece: usize, output: &mut [f32]| write(blocks[piece].0, blocks[piece].1, output);
            threads.install(|| fill_pieces(memory, &flat, write))
        });
        Self { values, splits: splits(sizes) }
    }

    /// Converts the floats to the type of the messages; 16-bit floats are stored as integers with their bits.
    fn on_wire(self, dtype: DataType) -> Tensor {
        let narrowed = |nearest: fn(f32) -> u16| {
            // SAFETY: `written` has created the tensor, and no other handle to it exists.
            let values = unsafe { tensors::as_slice(&self.values) };
            let bits: Vec<i16> = values.par_iter().map(|value| nearest(*value) as i16).collect();
            Tensor::from_slice(&bits)
        };
        match dtype {
            DataType::Fp32 => self.values,
            DataType::Bf16 => narrowed(nearest_bf16),
            DataType::Fp16 => narrowed(nearest_fp16),
        }
    }
}

impl Arriving {
    /// Waits for the vectors.
    pub(super) fn wait(self) -> Result<Arrived> {
        self.pending.wait()?;
        Ok(self.vectors)
    }
}

impl Arrived {
    /// Returns the vectors, ordered by the rank that sent them and by block.
    pub(super) fn elements(&self) -> Elements<'_> {
        // SAFETY: the operation that wrote the tensor has ended, and no other handle to it exists.
        unsafe {
            match self.dtype {
                DataType::Fp32 => Elements::Fp32(tensors::as_slice(&self.values)),
                DataType::Bf16 => Elements::Bf16(tensors::as_bits(&self.values)),
                DataType::Fp16 => Elements::Fp16(tensors::as_bits(&self.values)),
            }
        }
    }
}

impl Exchange {
    /// Starts sending vectors, and receiving others with these sizes, by rank and block.
    pub(super) fn exchange(
        &self,
        outgoing: Outgoing,
        received: &[Vec<usize>],
        counter: &AtomicU64,
    ) -> Result<Arriving> {
        let (sent, received) = (outgoing.splits.clone(), splits(received));
        let outgoing = outgoing.on_wire(self.dtype);
        let values = Tensor::f_empty([received.iter().sum::<i64>()], (outgoing.kind(), Device::Cpu))?;
        let pending = self.collectives.all_to_all(&values, &received, &outgoing, &sent)?;
        self.count(counter, &sent, self.dtype.bytes());
        Ok(Arriving { pending, vectors: Arrived { values, dtype: self.dtype } })
    }

    /// Starts sending vectors to all ranks, and receiving as many from each.
    pub(super) fn gather(&self, outgoing: Outgoing, counter: &AtomicU64) -> Result<Arriving> {
        let outgoing = outgoing.on_wire(self.dtype);
        let (ranks, length) = (self.collectives.size() as usize, outgoing.numel());
        let values = Tensor::f_empty([(ranks * length) as i64], (outgoing.kind(), Device::Cpu))?;
        let pending = self.collectives.all_gather(&values, &outgoing)?;
        self.count(counter, &vec![length as i64; ranks], self.dtype.bytes());
        Ok(Arriving { pending, vectors: Arrived { values, dtype: self.dtype } })
    }
}

/// Returns the number of floats per rank, given the numbers per rank and block.
fn splits(sizes: &[Vec<usize>]) -> Vec<i64> {
    sizes.iter().map(|sizes| sizes.iter().sum::<usize>() as i64).collect()
}
