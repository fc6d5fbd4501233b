//! The engine's memory, handed out so that operators that spill badly need not.

use std::fmt;

use datafusion::error::Result;
use datafusion::execution::memory_pool::{
    FairSpillPool, MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};

/// DataFusion's [`FairSpillPool`], but that exchanges between threads get what they ask for and have no share of their own.
///
/// DataFusion 55's `RepartitionExec` can wait for itself for ever once two of its inputs have spilled
/// (apache/datafusion#24883). What it holds is little, because it stops its inputs while all of its outputs wait, and it is
/// counted: others have as much less.
#[derive(Debug)]
pub(crate) struct EnginePool(FairSpillPool);

impl EnginePool {
    /// A pool of so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(FairSpillPool::new(bytes))
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
        self.0.grow(reservation, additional);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.0.shrink(reservation, shrink);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        if is_exchange(reservation.consumer()) {
            self.0.grow(reservation, additional);
            return Ok(());
        }
        self.0.try_grow(reservation, additional)
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
        let pool: Arc<dyn MemoryPool> = Arc::new(EnginePool::new(1000));
        let consumer = |name: &str| MemoryConsumer::new(name).with_can_spill(true).register(&pool);
        let (sort, exchange) = (consumer("ExternalSorter[0]"), consumer("RepartitionExec[0]"));
        // The sort's share is all there is.
        sort.try_grow(900).unwrap();
        assert!(sort.try_grow(200).is_err());
        exchange.try_grow(5000).unwrap();
        assert_eq!(pool.reserved(), 5900);
        // What cannot spill finds nothing left.
        assert!(MemoryConsumer::new("HashJoinInput[0]").register(&pool).try_grow(1).is_err());
        drop(exchange);
        drop(consumer("RepartitionExec[1]"));
        assert_eq!(pool.reserved(), 900);
        sort.try_grow(100).unwrap();
        let other = consumer("ExternalSorter[1]");
        sort.shrink(1000);
        assert!(other.try_grow(501).is_err(), "two sorts have half each");
        other.try_grow(500).unwrap();
    }
}
