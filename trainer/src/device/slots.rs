//! Memory that parcels pass through on their way to the device, used by turns.

use std::sync::{Arc, Mutex, PoisonError};

use tch::Tensor;

use super::parcel::Parcel;
use super::{Accelerator, Slot};
use crate::Result;

/// Slots for parcels of one kind, so that they differ little in size.
#[derive(Debug, Clone)]
pub(crate) struct Slots {
    accelerator: Accelerator,
    free: Arc<Mutex<Vec<Box<dyn Slot>>>>,
}

/// A slot in use. Once it is dropped, another parcel may take its place when the device has done what was enqueued
/// before.
#[derive(Debug)]
pub(super) struct Delivery {
    slot: Option<Box<dyn Slot>>,
    slots: Slots,
}

impl Slots {
    pub(crate) fn new(accelerator: &Accelerator) -> Self {
        Self { accelerator: accelerator.clone(), free: Arc::default() }
    }

    /// A slot for so many words: a free one, or a new one. Two are in use where one batch is computed and one copied.
    fn slot(&self, words: usize) -> Result<Box<dyn Slot>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        match free.pop() {
            Some(slot) if slot.capacity() >= words => Ok(slot),
            // A slot that is too small gives its memory back. Batches differ little: an eighth more will do for the
            // next ones.
            _ => self.accelerator.driver.slot((words + words / 8).max(1 << 10)),
        }
    }

    /// Begins to copy a parcel to the device.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`](crate::Error::Fault) if memory cannot be had.
    pub(super) fn send(&self, parcel: &Parcel<'_>) -> Result<Delivery> {
        let mut slot = self.slot(parcel.words)?;
        parcel.write(slot.host()?);
        slot.copy(parcel.words)?;
        Ok(Delivery { slot: Some(slot), slots: self.clone() })
    }
}

impl Delivery {
    /// The device's memory, bytes.
    pub(super) fn device(&self) -> &Tensor {
        self.slot.as_ref().expect("a slot is there until it is dropped").device()
    }

    /// Makes what is enqueued from now on wait for the parcel.
    pub(super) fn arrive(&mut self) -> Result<()> {
        self.slot.as_mut().map_or(Ok(()), |slot| slot.arrive())
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot.take() else { return };
        // A slot whose device has failed is of no use to another parcel.
        if slot.release().is_ok() {
            self.slots.free.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        }
    }
}
