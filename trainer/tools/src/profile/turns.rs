//! Lets ranks take turns on a machine's processors, so that each is timed as if it had them for itself.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use onefold_base::fault::{Fault, Kind};
use onefold_base::sync::locked;
use onefold_trainer::distributed::{Collectives, Operation, Pending};
use onefold_trainer::{Error, Result};
use serde::{Deserialize, Serialize};
use tch::Device;

use super::PATIENCE;
use super::machine::Clock;

/// [`Collectives`] between whose operations only one rank works at a time. The ranks must be on one machine.
///
/// Between two exchanges, every rank has a **turn**, in which the other ranks wait. Exchanges begin on all
/// ranks together and end before the next turn, so work and exchange do not overlap. The measured time of a
/// step is the time that it would take if every rank had its own machine like this one, and ranks waited for
/// the slowest one before every exchange.
#[derive(Debug)]
pub(super) struct Turns {
    /// The collectives without turns.
    pub(super) inner: Arc<dyn Collectives>,
    threads: usize,
    baton: Baton,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    turn: Option<Clock>,
    step: Step,
}

/// Passes turns between ranks, through a Unix socket per rank in a common folder. A rank sleeps until it gets a
/// message. Gloo cannot be used for this: a rank that gets a message before it receives it keeps a processor
/// busy until then.
#[derive(Debug)]
struct Baton {
    rank: u32,
    /// The paths of the sockets, by rank.
    sockets: Vec<PathBuf>,
    own: UnixDatagram,
    /// The folder of the sockets, on rank 0; removed when it is dropped.
    _folder: Option<tempfile::TempDir>,
}

/// The message that it is the rank's turn.
const TURN: u8 = 0;
/// The message that all ranks have had their turns.
const OVER: u8 = 1;
/// The message that a rank has failed.
const FAILED: u8 = 2;
/// The message that a rank sleeps until its turn.
const READY: u8 = 3;

impl Baton {
    fn new(collectives: &dyn Collectives) -> Result<Self> {
        let folder = (collectives.rank() == 0).then(tempfile::tempdir).transpose()?;
        let path = folder.as_ref().map(|folder| folder.path().as_os_str().as_encoded_bytes());
        let path = collectives.gather_bytes(path.unwrap_or_default())?.swap_remove(0);
        let path = PathBuf::from(OsString::from_vec(path));
        let sockets: Vec<PathBuf> =
            (0..collectives.size()).map(|rank| path.join(format!("{rank}.socket"))).collect();
        let rank = collectives.rank();
        let bound = UnixDatagram::bind(&sockets[rank as usize]).map_err(|_| {
            let message = "the ranks are not on one machine, where they could take turns";
            let hint = "start all of them here: `onefold-train-tools launch --ranks N -- …`";
            Error::from(Fault::new(Kind::Failed, message).hint(hint))
        });
        let own = collectives.agree(bound)?;
        own.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { rank, sockets, own, _folder: folder })
    }

    fn tell(&self, rank: u32, message: u8) -> Result<()> {
        self.own.send_to(&[message], &self.sockets[rank as usize])?;
        Ok(())
    }

    /// Sends a message to all other ranks, and returns the first error after that.
    fn tell_others(&self, message: u8) -> Result<()> {
        let others = (0..self.sockets.len() as u32).filter(|rank| *rank != self.rank);
        others.map(|rank| self.tell(rank, message)).fold(Ok(()), Result::and)
    }

    /// Waits for a message.
    fn wait_for(&self, message: u8) -> Result<()> {
        let mut told = [FAILED];
        match self.own.recv(&mut told) {
            Ok(1) if told == [message] => Ok(()),
            Ok(_) => Err(failed("another rank failed in its turn")),
            Err(_) => Err(failed("another rank did not end its turn")),
        }
    }

    /// Waits for this rank's turn. The first turn begins when all other ranks sleep.
    fn take(&self) -> Result<()> {
        if self.rank == 0 {
            return self.sockets.iter().skip(1).try_for_each(|_| self.wait_for(READY));
        }
        self.tell(0, READY)?;
        self.wait_for(TURN)
    }

    /// Ends this rank's turn, and waits until all ranks have had theirs.
    fn pass(&self) -> Result<()> {
        let next = self.rank + 1;
        if next as usize == self.sockets.len() {
            return self.tell_others(OVER);
        }
        self.tell(next, TURN)?;
        self.wait_for(OVER)
    }
}

/// The times of one rank's parts of a step, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Step {
    /// The time of each turn.
    pub(super) turns_ms: Vec<f64>,
    /// The time of each exchange between two turns.
    pub(super) exchanges_ms: Vec<f64>,
}

impl Step {
    /// Returns the working time of the rank in milliseconds.
    pub(super) fn work_ms(&self) -> f64 {
        self.turns_ms.iter().sum()
    }
}

impl Turns {
    /// Creates turns between the operations of `inner`, whose ranks have `threads` threads each.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the ranks are on several machines; the errors of all collective operations.
    pub(super) fn new(inner: Arc<dyn Collectives>, threads: usize) -> Result<Self> {
        let baton = Baton::new(inner.as_ref())?;
        Ok(Self { inner, threads, baton, state: Mutex::default() })
    }

    /// Begins a step: waits for this rank's turn.
    pub(super) fn begin(&self) -> Result<()> {
        self.lock().step = Step::default();
        self.begin_turn()
    }

    /// Ends a step, after all ranks have had their last turn.
    pub(super) fn end(&self) -> Result<Step> {
        self.end_turn()?;
        // No rank may leave, and remove the sockets, before all ranks know that the turns are over.
        self.inner.barrier()?;
        Ok(std::mem::take(&mut self.lock().step))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn begin_turn(&self) -> Result<()> {
        self.baton.take()?;
        self.lock().turn = Some(Clock::start(self.threads));
        Ok(())
    }

    fn end_turn(&self) -> Result<()> {
        {
            let mut state = self.lock();
            if let Some(clock) = state.turn.take() {
                let ms = clock.ms();
                state.step.turns_ms.push(ms);
            }
        }
        self.baton.pass()
    }
}

impl Collectives for Turns {
    fn rank(&self) -> u32 {
        self.inner.rank()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    fn device_of(&self, device: Device) -> Device {
        self.inner.device_of(device)
    }

    /// Runs an operation between two turns.
    fn start(&self, operation: Operation) -> Result<Pending> {
        self.end_turn()?;
        let started = Instant::now();
        self.inner.start(operation)?.wait()?;
        self.lock().step.exchanges_ms.push(started.elapsed().as_secs_f64() * 1e3);
        self.begin_turn()?;
        Ok(Pending::done())
    }

    fn set_step(&self, step: u64) {
        self.inner.set_step(step);
    }

    fn abort(&self, message: &str) {
        self.inner.abort(message);
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        // A rank that leaves must not make others wait. Rank 0 sends the message before it removes the sockets,
        // so each rank gets it even if the failed rank is too late. After the last step, no rank waits any
        // more.
        let _ = self.baton.tell_others(FAILED);
    }
}

fn failed(message: &str) -> Error {
    Error::collective("turn", message)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use onefold_trainer::distributed::{ThreadCollectives, threads};
    use tch::Tensor;

    use super::*;

    /// Only one rank works at a time, and every rank counts each part of a step.
    #[test]
    fn one_rank_works_at_a_time() {
        const RANKS: u32 = 3;
        let (working, together) = (AtomicU32::new(0), AtomicU32::new(0));
        let (working, together) = (&working, &together);
        let work = || {
            if working.fetch_add(1, Ordering::SeqCst) > 0 {
                together.fetch_add(1, Ordering::SeqCst);
            }
            std::thread::sleep(Duration::from_millis(2));
            working.fetch_sub(1, Ordering::SeqCst);
        };
        let work = &work;
        std::thread::scope(|scope| {
            for inner in threads(RANKS, Duration::from_secs(300)) {
                scope.spawn(move || {
                    let turns = Turns::new(Arc::new(inner), 1).unwrap();
                    for _ in 0..2 {
                        turns.begin().unwrap();
                        work();
                        let (sum, own) = (Tensor::from_slice(&[1.0f32]), Tensor::from_slice(&[2.0f32]));
                        turns.all_reduce(&sum).unwrap().wait().unwrap();
                        work();
                        let all = Tensor::zeros([3], (tch::Kind::Float, Device::Cpu));
                        turns.all_gather(&all, &own).unwrap().wait().unwrap();
                        work();
                        let step = turns.end().unwrap();
                        assert_eq!((step.turns_ms.len(), step.exchanges_ms.len()), (3, 2));
                        assert!(step.turns_ms.iter().all(|ms| *ms > 0.0), "{step:?}");
                        assert_eq!(Vec::<f32>::try_from(&sum).unwrap(), [3.0]);
                        assert_eq!(Vec::<f32>::try_from(&all).unwrap(), [2.0; 3]);
                    }
                });
            }
        });
        assert_eq!(together.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_rank_that_fails_in_its_turn_ends_the_others() {
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let of_rank = |inner: ThreadCollectives| {
                scope.spawn(move || {
                    let rank = inner.rank();
                    let turns = Turns::new(Arc::new(inner), 1).unwrap();
                    turns.begin()?;
                    if rank == 1 { Err(failed("of its own")) } else { turns.end().map(drop) }
                })
            };
            let ranks: Vec<_> = threads(3, Duration::from_secs(300)).into_iter().map(of_rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let messages: Vec<String> =
            results.into_iter().map(|result| result.unwrap_err().to_string()).collect();
        assert!(messages[1].contains("of its own"), "{messages:?}");
        for rank in [0, 2] {
            assert!(messages[rank].contains("another rank failed in its turn"), "{messages:?}");
        }
    }

    /// Rank 0 leaves, and removes the sockets, before rank 1 can tell rank 2 that it failed.
    #[test]
    fn removed_sockets_end_the_wait_of_other_ranks() {
        let mut ranks: Vec<Turns> = std::thread::scope(|scope| {
            let of_rank = |inner| scope.spawn(move || Turns::new(Arc::new(inner), 1).unwrap());
            let ranks: Vec<_> = threads(3, Duration::from_secs(300)).into_iter().map(of_rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let last = ranks.pop().unwrap();
        last.baton.own.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        ranks.into_iter().for_each(drop);
        let error = last.baton.wait_for(TURN).unwrap_err().to_string();
        assert!(error.contains("another rank failed in its turn"), "{error}");
    }
}
