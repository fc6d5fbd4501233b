//! Writes event files with scalars over steps for TensorBoard.
//!
//! An event file is a sequence of TFRecords (TensorFlow's `record_writer.h`): length of the data, masked
//! CRC-32C of the length, data, masked CRC-32C of the data, all little-endian. The data are `Event` protobufs
//! (`event.proto`). Scalars need only a few of their fields, which this module encodes itself.

use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::Result;

/// The constant that TensorFlow adds to a rotated checksum, so that a checksum differs from checksums inside
/// the data (`crc32c.h`).
const MASK_DELTA: u32 = 0xa282_ead8;
/// The value of `Event.file_version` in the first record.
const FILE_VERSION: &str = "brain.Event:2";

/// The wire types of protobuf.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const BYTES: u64 = 2;
const FIXED32: u64 = 5;

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    out: BufWriter<fs_err::File>,
}

impl EventWriter {
    /// Creates a new event file in `directory`, next to the files of earlier starts. TensorBoard then hides
    /// earlier events at `first_step` or later.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the file cannot be written.
    pub fn create(directory: &Path, first_step: u64) -> Result<Self> {
        let now = now();
        // TensorBoard reads the files of a directory in the order of their names.
        let name = format!("events.out.tfevents.{:017.6}.{}.onefold", now, std::process::id());
        let out = BufWriter::new(fs_err::File::create(directory.join(name))?);
        let mut writer = Self { out };
        let mut version = Message::event(now, 0);
        version.bytes(3, FILE_VERSION.as_bytes());
        writer.record(&version)?;
        if first_step > 0 {
            // `SessionLog { status: START }` invalidates earlier events at this step or later.
            let (mut session, mut event) = (Message::default(), Message::event(now, first_step));
            session.varint(1, 1);
            event.bytes(7, &session.0);
            writer.record(&event)?;
        }
        writer.flush()?;
        Ok(writer)
    }

    /// Adds the values of several scalars at a step.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if they cannot be written.
    pub fn scalars<'a>(
        &mut self,
        step: u64,
        scalars: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> Result<()> {
        let mut summary = Message::default();
        for (tag, scalar) in scalars {
            let mut value = Message::default();
            value.bytes(1, tag.as_bytes());
            value.float(2, scalar as f32);
            summary.bytes(1, &value.0);
        }
        let mut event = Message::event(now(), step);
        event.bytes(5, &summary.0);
        self.record(&event)
    }

    /// Flushes the file, so that TensorBoard sees all events.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the file cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.out.flush()?)
    }

    fn record(&mut self, message: &Message) -> Result<()> {
        let data = &message.0;
        let length = (data.len() as u64).to_le_bytes();
        self.out.write_all(&length)?;
        self.out.write_all(&masked_crc(&length).to_le_bytes())?;
        self.out.write_all(data)?;
        Ok(self.out.write_all(&masked_crc(data).to_le_bytes())?)
    }
}

/// Returns the seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// A protobuf message that is being built.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    /// Returns an `Event` with its time and step.
    fn event(wall_time: f64, step: u64) -> Self {
        let mut event = Self::default();
        event.key(1, FIXED64);
        event.0.extend(wall_time.to_le_bytes());
        event.varint(2, step);
        event
    }

    fn key(&mut self, field: u64, wire_type: u64) {
        self.raw_varint(field << 3 | wire_type);
    }

    fn raw_varint(&mut self, value: u64) {
        let mut value = value;
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.key(field, VARINT);
        self.raw_varint(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, FIXED32);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.key(field, BYTES);
        self.raw_varint(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A field of a message: its number and its value, as a number or as bytes.
    #[derive(Debug, PartialEq)]
    enum Field<'a> {
        Number(u64, u64),
        Bytes(u64, &'a [u8]),
    }

    /// Reads a protobuf message by its wire format (protobuf.dev, "Encoding").
    fn fields(mut data: &[u8]) -> Vec<Field<'_>> {
        fn varint(data: &mut &[u8]) -> u64 {
            let (mut value, mut shift) = (0, 0);
            loop {
                let (byte, rest) = data.split_first().unwrap();
                *data = rest;
                value |= u64::from(byte & 0x7f) << shift;
                shift += 7;
                if byte & 0x80 == 0 {
                    return value;
                }
            }
        }
        let mut found = Vec::new();
        while !data.is_empty() {
            let key = varint(&mut data);
            let number = key >> 3;
            match key & 7 {
                0 => found.push(Field::Number(number, varint(&mut data))),
                2 => {
                    let length = varint(&mut data) as usize;
                    let (bytes, rest) = data.split_at(length);
                    data = rest;
                    found.push(Field::Bytes(number, bytes));
                }
                fixed => {
                    let (bytes, rest) = data.split_at(if fixed == 1 { 8 } else { 4 });
                    data = rest;
                    found.push(Field::Bytes(number, bytes));
                }
            }
        }
        found
    }

    /// Returns the records of an event file, and checks their checksums.
    fn records(bytes: &[u8]) -> Vec<&[u8]> {
        let (mut rest, mut found) = (bytes, Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let crc = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            assert_eq!(crc(8), masked_crc(&rest[..8]));
            let data = &rest[12..12 + length];
            assert_eq!(crc(12 + length), masked_crc(data));
            found.push(data);
            rest = &rest[16 + length..];
        }
        found
    }

    #[test]
    fn written_events_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(folder.path(), 300).unwrap();
        writer.scalars(300, [("train/loss", 0.5), ("train/ne", -2.25)]).unwrap();
        writer.flush().unwrap();
        let files: Vec<_> =
            fs_err::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let bytes = fs_err::read(&files[0]).unwrap();
        let records = records(&bytes);
        assert_eq!(records.len(), 3);
        let version = fields(records[0]);
        assert_eq!(version[1..], [Field::Number(2, 0), Field::Bytes(3, b"brain.Event:2")]);
        let start = fields(records[1]);
        assert_eq!(start[1..], [Field::Number(2, 300), Field::Bytes(7, &[8, 1])]);
        let scalars = fields(records[2]);
        assert_eq!(scalars[1], Field::Number(2, 300));
        let Field::Bytes(5, summary) = scalars[2] else { panic!("{scalars:?}") };
        let values: Vec<_> = fields(summary)
            .into_iter()
            .map(|value| match value {
                Field::Bytes(1, value) => value,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(values.len(), 2);
        let (tag, loss) = (Field::Bytes(1, b"train/ne"), (-2.25_f32).to_le_bytes());
        assert_eq!(fields(values[1]), [tag, Field::Bytes(2, &loss)]);
        let Field::Bytes(1, time) = fields(records[2])[0] else { panic!("no time") };
        let time = f64::from_le_bytes(time.try_into().unwrap());
        assert!((now() - time).abs() < 60.0);
    }

    /// The expected value is from PyPI's `tensorboard` 2.21:
    /// `tensorboard.compat.tensorflow_stub.pywrap_tensorflow.masked_crc32c(b"abc")`.
    #[test]
    fn checksums_are_those_of_tensorflow() {
        assert_eq!(masked_crc(b"abc"), 0x21f1_576e);
    }
}
