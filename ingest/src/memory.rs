//! The engine's memory, handed out so that operators that spill badly need not.

use std::fmt;

use datafusion::error::Result;
use datafusion::execution::memory_pool::{
    FairSpillPool, MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};

/// DataFusion's [`FairSpillPool`], but that exchanges between threads are not counted: they get what they ask for, have no
/// share of their own, and take nothing away from what sorts have set aside for merging.
///
/// DataFusion 55's `RepartitionExec` can wait for itself for ever once two of its inputs have spilled
/// (apache/datafusion#24883). What it holds is little, a few batches, because it stops its inputs while all of its
/// outputs wait. Two shares stay free for that, and for what sorts hold beyond what they say.
#[derive(Debug)]
pub(crate) struct EnginePool(FairSpillPool);

/// Shares that nobody gets.
const FREE_SHARES: usize = 2;

impl EnginePool {
    /// A pool of so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        let pool = FairSpillPool::new(bytes);
        for _ in 0..FREE_SHARES {
            pool.register(&MemoryConsumer::new("free").with_can_spill(true));
        }
        Self(pool)
    }
}

fn is_exchange(consumer: &MemoryConsumer) -> bool {
    consumer.name().starts_with("RepartitionExec")
}

impl MemoryPool for EnginePool {
    fn name(&self) -> &str {
        "engine"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        if !is_exchange(consumer) {
            self.0.register(consumer);
        }
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        if !is_exchange(consumer) {
            self.0.unregister(consumer);
        }
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        if !is_exchange(reservation.consumer()) {
            self.0.grow(reservation, additional);
        }
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        if !is_exchange(reservation.consumer()) {
            self.0.shrink(reservation, shrink);
        }
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        if is_exchange(reservation.consumer()) { Ok(()) } else { self.0.try_grow(reservation, additional) }
    }

    fn reserved(&self) -> usize {
        self.0.reserved()
    }

    fn memory_limit(&self) -> MemoryLimit {
        self.0.memory_limit()
    }
}

impl fmt::Display for EnginePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn exchanges_never_have_to_spill_and_take_no_share() {
        let pool: Arc<dyn MemoryPool> = Arc::new(EnginePool::new(3000));
        let consumer = |name: &str| MemoryConsumer::new(name).with_can_spill(true).register(&pool);
        let (sort, exchange) = (consumer("ExternalSorter[0]"), consumer("RepartitionExec[0]"));
        // The only sort has one share of three.
        sort.try_grow(900).unwrap();
        assert!(sort.try_grow(200).is_err());
        exchange.try_grow(5000).unwrap();
        exchange.grow(500);
        exchange.shrink(700);
        assert_eq!((exchange.size(), pool.reserved()), (4800, 900));
        // What cannot spill has what is left.
        let merge = MemoryConsumer::new("ExternalSorterMerge[0]").register(&pool);
        assert!(merge.try_grow(2101).is_err());
        merge.try_grow(2100).unwrap();
        drop((exchange, merge));
        drop(consumer("RepartitionExec[1]"));
        assert_eq!(pool.reserved(), 900);
        sort.try_grow(100).unwrap();
        let other = consumer("ExternalSorter[1]");
        sort.shrink(1000);
        assert!(other.try_grow(751).is_err(), "two sorts have two shares of four");
        other.try_grow(750).unwrap();
    }
}
