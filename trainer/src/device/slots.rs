//! Reusable memory through which parcels are copied to the device.

use std::sync::{Arc, Mutex};

use onefold_base::sync::locked;
use tch::Tensor;

use super::parcel::Parcel;
use super::{Accelerator, Slot};
use crate::Result;

/// A pool of slots for parcels of one kind, which have similar sizes.
#[derive(Debug, Clone)]
pub(crate) struct Slots {
    accelerator: Accelerator,
    free: Arc<Mutex<Vec<Box<dyn Slot>>>>,
}

/// A slot in use. After it is dropped, the slot can be reused for another parcel, whose copy waits for the work
/// that the device was given before.
#[derive(Debug)]
pub(super) struct Delivery {
    slot: Option<Box<dyn Slot>>,
    slots: Slots,
}

impl Slots {
    pub(crate) fn new(accelerator: &Accelerator) -> Self {
        Self { accelerator: accelerator.clone(), free: Arc::default() }
    }

    /// Returns a free slot with room for `words` words, or a new slot. Two slots are in use if one batch is copied
    /// while another is computed.
    fn slot(&self, words: usize) -> Result<Box<dyn Slot>> {
        let mut free = locked(&self.free);
        match free.pop() {
            Some(slot) if slot.capacity() >= words => Ok(slot),
            // Frees a slot that is too small. Batches have similar sizes, so an eighth more capacity suffices for
            // the next ones.
            _ => self.accelerator.driver.slot((words + words / 8).max(1 << 10)),
        }
    }

    /// Starts copying a parcel to the device.
    pub(super) fn send(&self, parcel: &Parcel<'_>) -> Result<Delivery> {
        let mut slot = self.slot(parcel.words)?;
        parcel.write(slot.host()?);
        slot.copy(parcel.words)?;
        Ok(Delivery { slot: Some(slot), slots: self.clone() })
    }
}

impl Delivery {
    /// Returns the device memory as bytes.
    pub(super) fn device(&self) -> &Tensor {
        self.slot.as_ref().expect("a slot is there until it is dropped").device()
    }

    /// Makes all work that is enqueued from now on wait for the parcel.
    pub(super) fn arrive(&mut self) -> Result<()> {
        self.slot.as_mut().map_or(Ok(()), |slot| slot.arrive())
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot.take() else { return };
        // After a device failure, the slot is not reused.
        if slot.release().is_ok() {
            locked(&self.slots.free).push(slot);
        }
    }
}
