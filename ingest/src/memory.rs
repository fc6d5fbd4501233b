//! The memory pool of the engine: a fair pool with a separate budget for exchanges between threads.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard};

use datafusion::error::Result;
use datafusion::execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation, human_readable_size,
};
use onefold_base::sync::locked;

/// A pool that divides its bytes among the operators that can spill and currently hold memory.
///
/// DataFusion's fair pool divides its bytes among all planned operators that can spill. A query has many of them, such
/// as aggregations that have ended or not begun, so a sort would get a small part of the memory. Operators that cannot
/// spill may take all free memory.
///
/// A query may have one exchange (`RepartitionExec`) per thread and step, and nearly all of them are empty. An exchange
/// with a slow consumer or a skewed key holds the rows that its consumer has not taken. Once all exchanges together
/// hold their budget, they write further batches to disk. `exchanges` makes that safe.
#[derive(Debug)]
pub(crate) struct EnginePool {
    bytes: usize,
    exchange_limit: usize,
    held: Mutex<Held>,
}

/// The bytes that operators hold.
#[derive(Debug, Default)]
struct Held {
    /// The bytes of operators that can spill, by consumer id. Operators that hold nothing have no entry.
    spillable: HashMap<usize, usize>,
    unspillable: usize,
    exchanges: usize,
}

/// The number of shares of the pool that no operator gets, because sorts hold slightly more than they reserve. At most
/// [`MOST_HEADROOM`] bytes are kept free.
const HEADROOM_SHARES: usize = 2;
/// The limit for the free shares, in bytes.
const MOST_HEADROOM: usize = 512 << 20;
/// The divisor of the pool's bytes that gives the minimum that each operator may hold. When an operator starts late,
/// others may hold more than their share. A sort that holds nothing has nothing to spill, and would fail without a
/// minimum.
const MINIMUM_PART: usize = 32;
/// The divisor of the memory that gives the budget of exchanges.
const EXCHANGE_PART: usize = 8;

impl EnginePool {
    /// Makes a pool of this number of bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let exchange_limit = bytes / EXCHANGE_PART;
        Self { bytes: bytes - exchange_limit, exchange_limit, held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        locked(&self.held)
    }

    /// Returns the bytes that no operator holds, without the budget of exchanges.
    fn free(&self, held: &Held) -> usize {
        let spillable: usize = held.spillable.values().sum();
        self.bytes.saturating_sub(spillable + held.unspillable)
    }

    /// Returns the bytes that an operator that can spill may hold.
    fn share(&self, held: &Held, consumer: &MemoryConsumer) -> usize {
        let shared = self.bytes.saturating_sub(held.unspillable);
        let is_new = !held.spillable.contains_key(&consumer.id());
        let operators = held.spillable.len() + usize::from(is_new);
        let shares = shared / (operators + HEADROOM_SHARES);
        shares.max(shared.saturating_sub(MOST_HEADROOM) / operators)
    }
}

/// Returns whether the consumer is the output buffer of an exchange. The merge of an exchange that keeps an order,
/// `RepartitionExec[Merge 0]`, cannot spill and takes its memory from the rest of the pool.
fn is_exchange(consumer: &MemoryConsumer) -> bool {
    consumer.name().starts_with("RepartitionExec") && consumer.can_spill()
}

impl Held {
    /// Returns the counter for a consumer: the shared one of exchanges, the shared one of operators that cannot spill, or
    /// else its own.
    fn of(&mut self, consumer: &MemoryConsumer) -> &mut usize {
        match consumer {
            exchange if is_exchange(exchange) => &mut self.exchanges,
            spilling if spilling.can_spill() => self.spillable.entry(spilling.id()).or_default(),
            _ => &mut self.unspillable,
        }
    }
}

impl MemoryPool for EnginePool {
    fn name(&self) -> &str {
        "engine"
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        if additional > 0 {
            *self.held().of(reservation.consumer()) += additional;
        }
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        let (mut held, consumer) = (self.held(), reservation.consumer());
        let bytes = held.of(consumer);
        *bytes = bytes.saturating_sub(shrink);
        if *bytes == 0 {
            held.spillable.remove(&consumer.id());
        }
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let (mut held, consumer) = (self.held(), reservation.consumer());
        let wanted = reservation.size().saturating_add(additional);
        let (fits, what) = if is_exchange(consumer) {
            let all = held.exchanges.saturating_add(additional);
            (
                all <= self.exchange_limit,
                (held.exchanges, self.exchange_limit, "exchanges between threads hold"),
            )
        } else {
            let (free, minimum) = (self.free(&held), self.bytes / MINIMUM_PART);
            let fair = !consumer.can_spill() || wanted <= self.share(&held, consumer);
            let all = (self.bytes - free, self.bytes, "operators hold");
            (fair && additional <= free || wanted <= minimum, all)
        };
        if !fits {
            let (all, limit, what) = what;
            return datafusion::common::resources_err!(
                "{what} {} of {}; {} needs {} in all",
                human_readable_size(all),
                human_readable_size(limit),
                consumer.name(),
                human_readable_size(wanted)
            );
        }
        if additional > 0 {
            *held.of(consumer) += additional;
        }
        Ok(())
    }

    fn reserved(&self) -> usize {
        let held = self.held();
        held.spillable.values().sum::<usize>() + held.unspillable + held.exchanges
    }

    fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit::Finite(self.bytes + self.exchange_limit)
    }
}

impl fmt::Display for EnginePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), human_readable_size(self.bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn exchanges_have_a_budget_of_their_own_and_take_no_share() {
        let pool: Arc<dyn MemoryPool> = Arc::new(EnginePool::new(3200));
        let consumer = |name: &str| MemoryConsumer::new(name).with_can_spill(true).register(&pool);
        let (sort, exchange) = (consumer("ExternalSorter[0]"), consumer("RepartitionExec[0]"));
        // 2800 bytes are divided into three shares. The only sort gets one of them.
        sort.try_grow(900).unwrap();
        assert!(sort.try_grow(200).is_err());
        let other = consumer("RepartitionExec[1]");
        exchange.try_grow(300).unwrap();
        assert!(other.try_grow(101).is_err(), "all exchanges share 400 bytes");
        other.try_grow(100).unwrap();
        assert_eq!(pool.reserved(), 1300);
        exchange.shrink(200);
        other.try_grow(200).unwrap();
        drop((exchange, other));
        assert_eq!(pool.reserved(), 900);
        // An operator that cannot spill may take all that is left of the pool.
        let merge = MemoryConsumer::new("ExternalSorterMerge[0]").register(&pool);
        assert!(merge.try_grow(1901).is_err());
        merge.try_grow(1900).unwrap();
        // Operators that cannot spill hold everything, but a sort that starts now may hold its first rows.
        merge.grow(900);
        let late = consumer("ExternalSorter[2]");
        late.try_grow(87).unwrap();
        assert!(late.try_grow(1).is_err(), "2800 / 32");
        drop((late, merge));
        sort.try_grow(33).unwrap();
        let other = consumer("ExternalSorter[1]");
        sort.shrink(433);
        assert!(other.try_grow(701).is_err(), "two sorts have two shares of four");
        other.try_grow(700).unwrap();
        // An operator that holds nothing has no share.
        sort.free();
        other.try_grow(233).unwrap();
        assert!(other.try_grow(1).is_err());
    }

    #[test]
    fn the_reserve_of_a_large_pool_is_limited() {
        let pool: Arc<dyn MemoryPool> = Arc::new(EnginePool::new(16 << 30));
        let sort = |part: usize| {
            MemoryConsumer::new(format!("ExternalSorter[{part}]")).with_can_spill(true).register(&pool)
        };
        let (one, other) = (sort(0), sort(1));
        one.try_grow(6 << 30).unwrap();
        other.try_grow(6 << 30).unwrap();
        assert!(one.try_grow(1 << 30).is_err(), "14 GiB less 512 MiB for both");
    }
}
