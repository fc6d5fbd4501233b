//! The memory that ranks need to exchange ids, vectors and gradients.

use crate::lookups::Lookups;
use crate::table::ACTIVATION_BYTES;
use crate::{Shard, ShardingType, Table, Topology};

/// Bytes of a word of a request.
const WORD_BYTES: f64 = 4.0;

/// Bytes that a step needs to exchange what is asked of a shard, as the trainer allocates them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BufferBytes {
    /// On every rank: what it sends the shard's rank and gets from there, to ask and to give back gradients.
    pub asking: u64,
    /// On the shard's rank besides: what it exchanges with the ranks that ask it, less what it does not ask itself.
    pub serving: u64,
}

/// The buffers of a shard of a table. A row shard is asked for the share of ids that its rows have.
///
/// A request has 8 bytes for every id and every list, as it stands once as it is sent or received and once as it is
/// looked up. Vectors travel in single precision, and their gradients back; a list of a row-wise table has a vector from
/// every shard that has a row of it. Every rank announces to all others which rows of a data-parallel table its batch
/// has, and sends their gradients; what reduces the gradient of the whole table instead, as TorchRec does, needs a dense
/// one: the larger of both is taken. A single rank needs nothing.
pub(crate) fn exchange_buffers(
    table: &Table,
    sharding_type: ShardingType,
    shard: &Shard,
    topology: &Topology,
    batch_size: u64,
) -> BufferBytes {
    let others = f64::from(topology.ranks.saturating_sub(1));
    if others == 0.0 {
        return BufferBytes::default();
    }
    let (samples, vector_bytes) = (batch_size as f64, shard.column_count() as f64 * ACTIVATION_BYTES);
    // A sum that saturates is over every limit.
    let whole = |bytes: f64| bytes.ceil() as u64;
    if sharding_type == ShardingType::DataParallel {
        // At most: ids repeat.
        let rows: f64 = table.lookups().map(|lookups| lookups.distinct(samples)[1]).sum();
        let sent = 2.0 * others * rows.min(table.rows as f64) * (2.0 * WORD_BYTES + vector_bytes);
        return BufferBytes { serving: whole(sent.max(table.rows as f64 * vector_bytes)), asking: 0 };
    }
    let of_feature = |lookups: Lookups<'_>| {
        let [lists, ids] = lookups.distinct(samples);
        let part = lookups.share_of(&shard.rows, table.rows);
        let (lists, ids) = (shared_lists(lists, ids, part), ids * part);
        let vectors = if lookups.pooling.is_sequence() { ids } else { lists };
        (ids + lists) * 2.0 * WORD_BYTES + 2.0 * vectors * vector_bytes
    };
    let asked: f64 = table.lookups().map(of_feature).sum();
    BufferBytes { serving: whole((others - 1.0) * asked), asking: whole(asked) }
}

/// How many of `lists` lists, with `ids` ids in all, have an id of which `part` of all, 0 to 1, are: every list is taken
/// to have as many ids. Of fewer ids than lists, each is taken to be a list of its own.
fn shared_lists(lists: f64, ids: f64, part: f64) -> f64 {
    if ids <= lists { ids * part } else { lists * (1.0 - (1.0 - part).powf(ids / lists)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shard_is_asked_for_the_lists_that_have_its_rows() {
        assert_eq!(shared_lists(100.0, 1000.0, 1.0), 100.0);
        // Of lists of two ids, a half has none in the other half's three quarters of the time.
        assert_eq!(shared_lists(100.0, 200.0, 0.5), 75.0);
        assert_eq!(shared_lists(100.0, 40.0, 0.25), 10.0);
        let topology = Topology::h100(4, 1 << 30).unwrap();
        let of = |table: &Table, kind, parts| {
            let shard = Shard { rank: 0, rows: 0..table.rows / parts, columns: 0..8 };
            exchange_buffers(table, kind, &shard, &topology, 100)
        };
        let table = Table::new("t", 1000, 8);
        let quarter = of(&table, ShardingType::RowWise, 4);
        assert_eq!(quarter, BufferBytes { serving: 2 * 25 * (16 + 64), asking: 25 * (16 + 64) });
        // A copy sends the rows of its own batch to all others: of a table of few rows, all of them.
        let few =
            of(&Table { pooling_factor: 1000.0, ..Table::new("few", 10, 8) }, ShardingType::DataParallel, 1);
        assert!(few.serving.abs_diff(2 * 3 * 10 * (8 + 32)) <= 1 && few.asking == 0, "{few:?}");
        let many = of(&Table::new("many", 100_000, 8), ShardingType::DataParallel, 1);
        assert_eq!(many.serving, 100_000 * 32);
        assert_eq!(
            exchange_buffers(
                &table,
                ShardingType::RowWise,
                &Shard::whole(&table, 0),
                &Topology::h100(1, 9).unwrap(),
                9
            ),
            BufferBytes::default()
        );
    }
}
