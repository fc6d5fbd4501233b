//! The engine's memory: DataFusion's fair pool, with a budget of its own for exchanges between threads.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use datafusion::error::Result;
use datafusion::execution::memory_pool::{
    FairSpillPool, MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation, human_readable_size,
};

/// DataFusion's [`FairSpillPool`], except that exchanges between threads (`RepartitionExec`) share a fixed budget.
///
/// The fair pool divides its bytes among all operators that can spill. A query may have one exchange for every thread
/// and step, nearly all of them empty; as members they would take most of the memory away from sorts. An exchange whose
/// consumer is slow, or whose key is skewed, holds what its consumer has not taken. Once all exchanges together hold
/// their budget, they write further batches to disk. `exchanges` makes that safe.
#[derive(Debug)]
pub(crate) struct EnginePool {
    pool: FairSpillPool,
    exchange_limit: usize,
    exchanged: AtomicUsize,
    /// What every operator may hold, whatever the others hold.
    minimum: usize,
}

/// Shares of the fair pool that no operator gets: sorts hold a little more than they reserve.
const HEADROOM_SHARES: usize = 2;
/// Every operator may hold one of so many parts of the pool. An operator that starts late finds others that hold more
/// than their share by now; a sort that holds nothing has nothing to spill, and would fail.
const MINIMUM_PART: usize = 32;
/// Exchanges get one of so many parts of the memory.
const EXCHANGE_PART: usize = 8;

impl EnginePool {
    /// A pool of so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let exchange_limit = bytes / EXCHANGE_PART;
        let pool = FairSpillPool::new(bytes - exchange_limit);
        for _ in 0..HEADROOM_SHARES {
            pool.register(&MemoryConsumer::new("headroom").with_can_spill(true));
        }
        let minimum = (bytes - exchange_limit) / MINIMUM_PART;
        Self { pool, exchange_limit, exchanged: AtomicUsize::new(0), minimum }
    }
}

/// Whether the consumer is what an exchange holds for its outputs. The merge of an exchange that keeps an order,
/// `RepartitionExec[Merge 0]`, cannot spill, and is a member of the pool.
fn is_exchange(consumer: &MemoryConsumer) -> bool {
    consumer.name().starts_with("RepartitionExec") && consumer.can_spill()
}

impl MemoryPool for EnginePool {
    fn name(&self) -> &str {
        "engine"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        if !is_exchange(consumer) {
            self.pool.register(consumer);
        }
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        if !is_exchange(consumer) {
            self.pool.unregister(consumer);
        }
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        if is_exchange(reservation.consumer()) {
            self.exchanged.fetch_add(additional, Ordering::Relaxed);
        } else {
            self.pool.grow(reservation, additional);
        }
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        if is_exchange(reservation.consumer()) {
            self.exchanged.fetch_sub(shrink, Ordering::Relaxed);
        } else {
            self.pool.shrink(reservation, shrink);
        }
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        if !is_exchange(reservation.consumer()) {
            let result = self.pool.try_grow(reservation, additional);
            if result.is_err() && reservation.size().saturating_add(additional) <= self.minimum {
                self.pool.grow(reservation, additional);
                return Ok(());
            }
            return result;
        }
        let grown = |held: usize| held.checked_add(additional).filter(|held| *held <= self.exchange_limit);
        match self.exchanged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown) {
            Ok(_) => Ok(()),
            Err(held) => datafusion::common::resources_err!(
                "exchanges between threads hold {} of {}",
                human_readable_size(held),
                human_readable_size(self.exchange_limit)
            ),
        }
    }

    fn reserved(&self) -> usize {
        self.pool.reserved() + self.exchanged.load(Ordering::Relaxed)
    }

    fn memory_limit(&self) -> MemoryLimit {
        match self.pool.memory_limit() {
            MemoryLimit::Finite(bytes) => MemoryLimit::Finite(bytes + self.exchange_limit),
            other => other,
        }
    }
}

impl fmt::Display for EnginePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pool.fmt(f)
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
        // 2800 bytes are in three shares, of which the only sort has one.
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
        // An operator that cannot spill may have all that is left of the pool.
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
        sort.shrink(933);
        assert!(other.try_grow(701).is_err(), "two sorts have two shares of four");
        other.try_grow(700).unwrap();
    }
}
