//! Tests of ranks that have no batch yet.

use std::time::Duration;

use super::*;
use crate::distributed::threads;

/// Runs `work` on two ranks, and returns the results. `work` receives its rank and its tables. An operation times
/// out after 5 seconds.
fn on_two_ranks<T: Send>(work: impl Fn(u32, &Embeddings) -> T + Sync) -> Vec<T> {
    let configs = configs(DataType::Fp32, [0, 1, 2]);
    let optimizer = optimizer(TableOptimizer::Sgd);
    std::thread::scope(|scope| {
        let (configs, optimizer, work) = (&configs, &optimizer, &work);
        let of_rank = |collectives: crate::distributed::ThreadCollectives| {
            scope.spawn(move || {
                let rank = collectives.rank();
                let placement = Placement::even(configs, Arc::new(collectives));
                work(rank, &Embeddings::new(configs, &placement, optimizer, 1, 1).unwrap())
            })
        };
        let threads: Vec<_> = threads(2, Duration::from_secs(5)).into_iter().map(of_rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_says_that_it_waits_is_not_lost() {
    let heard = on_two_ranks(|rank, embeddings| {
        // The total time is longer than the timeout of an operation.
        for _ in 0..14 * rank {
            std::thread::sleep(Duration::from_millis(500));
            let statuses = embeddings.say_waiting().unwrap();
            assert_eq!(statuses.iter().map(|status| status.flags).collect::<Vec<_>>(), [4, Status::WAITING]);
        }
        let status = Status { flags: 4 - 4 * i64::from(rank), weight: f64::from(rank) };
        let mut request = embeddings.request(&[], status).unwrap();
        embeddings.statuses(&mut request).unwrap().to_vec()
    });
    let expected = [Status { flags: 4, weight: 0.0 }, Status { flags: 0, weight: 1.0 }];
    assert_eq!(heard, [expected, expected]);
}

#[test]
fn a_rank_that_waits_hears_that_another_has_failed() {
    let heard = on_two_ranks(|rank, embeddings| {
        let flags = |statuses: &[Status]| statuses.iter().map(|status| status.flags).collect::<Vec<_>>();
        if rank == 1 {
            return flags(&embeddings.say_waiting().unwrap());
        }
        let failed = Status { flags: Status::FAILED, weight: 0.0 };
        let mut request = embeddings.request(&[], failed).unwrap();
        flags(embeddings.statuses(&mut request).unwrap())
    });
    let expected = vec![Status::FAILED, Status::WAITING];
    assert_eq!(heard, [expected.clone(), expected]);
}
