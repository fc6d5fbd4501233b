//! Unpacks arbitrarily changed messages of a real batch: the result is an error, or a batch that does not change when
//! it is packed and unpacked again.
#![no_main]

use std::sync::{Arc, LazyLock};

use arrow::array::{ArrayRef, Int64Array, StringArray};
use arrow::buffer::Buffer;
use libfuzzer_sys::fuzz_target;
use onefold_ikjt::{Batch, BatchParts, Feature, Group, KeptValues, PackedBatch, Places};

/// A message with all optional parts: the JSON of its places, and its memory.
static BATCH: LazyLock<(String, Vec<u8>)> = LazyLock::new(|| {
    let window = Feature::try_new("w", vec![1_i64, 2, 3, 4], vec![0, 1], vec![3, 3]).unwrap();
    let apart = Feature::try_new("x", vec![7_i64, 8], vec![0, 1], vec![1, 1]).unwrap();
    let items = Feature::from_rows("i", &[vec![1], vec![], vec![-3, 4]]).unwrap();
    let integers: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(3)]));
    let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("bcd")]));
    let batch = Batch::try_new(BatchParts {
        size: 3,
        dense: vec![0.0; 6].into(),
        labels: vec![1.0; 3].into(),
        weights: Some(vec![2.0; 3].into()),
        timestamps: Some(vec![5; 3].into()),
        kept: vec![KeptValues::new("k", integers), KeptValues::new("t", texts)],
        groups: vec![
            Group::try_new("g", Some(vec![0, 1, 0].into()), vec![window, apart]).unwrap(),
            Group::try_new("h", None, vec![items]).unwrap(),
        ],
    });
    let packed = PackedBatch::copy_of(&batch.unwrap(), (2, 1), true);
    (serde_json::to_string(packed.places()).unwrap(), packed.memory().to_vec())
});

/// Applies changes of four bytes each: where to change (text or memory), the position (two bytes), and the new byte.
/// An odd total length means that ids have 32 bits.
fn changed(changes: &[u8]) -> Option<PackedBatch> {
    let (text, mut memory) = BATCH.clone();
    let mut text = text.into_bytes();
    for change in changes.chunks_exact(4) {
        let place = usize::from(u16::from_le_bytes([change[1], change[2]]));
        match change[0] % 3 {
            0 => memory[place % 1024.min(BATCH.1.len())] = change[3],
            1 => {
                let place = place % text.len();
                text[place] = change[3];
            }
            _ => {
                let place = place % (text.len() + 1);
                text.insert(place, change[3]);
            }
        }
    }
    let places: Places = serde_json::from_slice(&text).ok()?;
    PackedBatch::received(Buffer::from(memory), places, changes.len() % 2 == 1).ok()
}

fuzz_target!(|changes: &[u8]| {
    let Some(packed) = changed(changes) else { return };
    if let Ok(batch) = packed.unpack() {
        let widths = (packed.places().dense_width, packed.places().label_width);
        let once = PackedBatch::copy_of(&batch, widths, true);
        let twice = PackedBatch::copy_of(&once.unpack().expect("a batch"), widths, true);
        // Compares bytes, because floats may be NaN.
        assert!(once.memory() == twice.memory() && once.places() == twice.places());
    }
});
