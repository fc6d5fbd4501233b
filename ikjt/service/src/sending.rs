//! Messages to clients, in the form in which they are sent.
//!
//! A gRPC library encodes a message into a new buffer, which copies the whole batch. A message of Flight is just a
//! few bytes followed by the batch's memory, so this module passes both on one after the other:
//!
//! ```text
//! flag, length │ tag 3, length, header │ tag 1000, length │ body
//! └─ of gRPC ─┘ └──────────────── FlightData, in protocol buffers ────────────────┘
//! ```

use arrow::buffer::Buffer;
use bytes::{BufMut, Bytes, BytesMut};
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_ikjt::SentBatch;
use onefold_ikjt::service::protocol::{BatchHeader, MOST_MESSAGE_BYTES, Notice};
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};
use tonic::Status;
use xxhash_rust::xxh3::xxh3_64;

use crate::jobs::to_status;

/// The field numbers of `FlightData`.
const APP_METADATA: u32 = 3;
const DATA_BODY: u32 = 1000;

/// An encoded protocol buffers message in two parts.
pub(crate) type Encoded = (Bytes, Bytes);

/// A batch in the form in which it is sent.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) header: Bytes,
    pub(crate) body: Bytes,
    pub(crate) samples: u64,
}

/// A message to a client.
#[derive(Debug)]
pub(crate) enum Sent {
    Batch(Message),
    /// The reason why the next batch is delayed.
    Notice(Notice),
}

impl Sent {
    pub(crate) fn encoded(self) -> Result<Encoded, Status> {
        match self {
            Self::Batch(message) => Ok(message.encoded()),
            Self::Notice(notice) => {
                let json =
                    serde_json::to_vec(&notice).map_err(|error| Status::internal(error.to_string()))?;
                let data = arrow_flight::FlightData { data_header: json.into(), ..Default::default() };
                Ok((data.encode_to_vec().into(), Bytes::new()))
            }
        }
    }
}

/// The body of a message.
struct Memory(Buffer);

impl AsRef<[u8]> for Memory {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Message {
    /// Creates the message of a batch.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` if the batch exceeds the maximal size of a message.
    pub(crate) fn new(step: u64, batch: SentBatch) -> Result<Self, Status> {
        let SentBatch { memory: body, places, narrow } = batch;
        let bytes = body.len();
        if bytes > MOST_MESSAGE_BYTES {
            let message = format!(
                "the batch of step {step} has {bytes} bytes, and a message has at most {MOST_MESSAGE_BYTES}"
            );
            let hint = text!["lower ", option("global_batch_size"), ", or read fewer features"];
            return Err(to_status(&Fault::new(Kind::Options, message).hint(hint)));
        }
        let samples = places.size as u64;
        let header = BatchHeader { step, checksum: xxh3_64(&body), narrow, places };
        let mut header = serde_json::to_vec(&header).map_err(|error| Status::internal(error.to_string()))?;
        header.resize(header.len() + padding(header.len(), bytes), b' ');
        Ok(Self { header: header.into(), body: Bytes::from_owner(Memory(body)), samples })
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.header.len() + self.body.len()) as u64
    }

    /// Returns the part of the encoded message before the body.
    fn before_body(&self) -> BytesMut {
        let mut before = BytesMut::with_capacity(self.header.len() + 32);
        encode_key(APP_METADATA, WireType::LengthDelimited, &mut before);
        encode_varint(self.header.len() as u64, &mut before);
        before.put_slice(&self.header);
        encode_key(DATA_BODY, WireType::LengthDelimited, &mut before);
        encode_varint(self.body.len() as u64, &mut before);
        before
    }

    fn encoded(self) -> Encoded {
        (self.before_body().freeze(), self.body)
    }
}

/// Returns the parts of a gRPC frame with a message.
pub(crate) fn frames_of((before, body): Encoded, compressed: bool) -> Result<[Bytes; 2], Status> {
    let prefixed = |flag: u8, bytes: usize, first: &[u8]| {
        let mut prefixed = BytesMut::with_capacity(first.len() + 5);
        prefixed.put_u8(flag);
        // A message has fewer than 2^32 bytes.
        prefixed.put_u32(bytes as u32);
        prefixed.put_slice(first);
        prefixed.freeze()
    };
    if !compressed {
        return Ok([prefixed(0, before.len() + body.len(), &before), body]);
    }
    let compress = || {
        let mut encoder = zstd::Encoder::new(Vec::new(), zstd::DEFAULT_COMPRESSION_LEVEL)?;
        std::io::Write::write_all(&mut encoder, &before)?;
        std::io::Write::write_all(&mut encoder, &body)?;
        encoder.finish()
    };
    let bytes = compress().map_err(|error| Status::internal(error.to_string()))?;
    Ok([prefixed(1, bytes.len(), &[]), bytes.into()])
}

/// Returns the number of spaces after a header with which the body begins at a multiple of 64 in the encoded message.
/// If a client receives the message into aligned memory, it does not have to copy the batch.
fn padding(header: usize, body: usize) -> usize {
    // A field of protocol buffers is its tag, its length and its bytes. The tag of the body, 1000, takes two bytes.
    let length_bytes = |length: usize| (usize::BITS - length.leading_zeros()).max(1).div_ceil(7) as usize;
    let start = |padding: usize| {
        let header = header + padding;
        1 + length_bytes(header) + header + 2 + length_bytes(body)
    };
    (0..128).find(|padding| start(*padding).is_multiple_of(64)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use arrow_flight::FlightData;

    use super::*;

    #[test]
    fn bodies_are_aligned_in_encoded_messages() {
        for header in (0..300).chain([16_200, 16_383, 16_384, 70_000]) {
            for body in [64, 128, 16_384, 1 << 21] {
                let header = vec![b' '; header + padding(header, body)].into();
                let message = Message { header, body: vec![7; body].into(), samples: 0 };
                let place = message.before_body().len();
                assert_eq!(place % 64, 0, "{place} {body}");
            }
        }
    }

    #[test]
    fn messages_are_those_of_flight() {
        for (header, body) in [(0, 0), (3, 64), (200, 1 << 14), (70_000, 1 << 21)] {
            let message =
                Message { header: vec![b'h'; header].into(), body: vec![7; body].into(), samples: 1 };
            let [first, second] = frames_of(message.clone().encoded(), false).unwrap();
            let all = [first, second].concat();
            let length = u32::from_be_bytes(all[1..5].try_into().unwrap()) as usize;
            assert_eq!((all[0], length), (0, all.len() - 5));
            let found = FlightData::decode(&all[5..]).unwrap();
            assert!(found.app_metadata == message.header && found.data_body == message.body);
            let [first, second] = frames_of(message.clone().encoded(), true).unwrap();
            let length = u32::from_be_bytes(first[1..5].try_into().unwrap()) as usize;
            assert_eq!((first[0], first.len(), length), (1, 5, second.len()));
            let found = FlightData::decode(&*zstd::decode_all(&*second).unwrap()).unwrap();
            assert!(found.app_metadata == message.header && found.data_body == message.body);
        }
    }
}
