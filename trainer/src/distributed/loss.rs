//! Determines which rank is lost when a collective operation fails.
//!
//! Every rank has a thread that polls the store. A rank whose operation fails, or that ends with its own error,
//! leaves a note in the store. The threads of the other ranks see it and leave notes too, independent of what
//! their ranks are doing. A rank without a note after [`SETTLE`] is lost; a rank that its launcher has seen end
//! is not waited for. All ranks judge by the same notes, so they reach the same verdict, and the lowest
//! remaining rank reports it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onefold_base::sync::locked;

use super::c10d::{Said, Store};
use crate::{Error, Result};

/// The interval at which the store is polled.
const POLL: Duration = Duration::from_millis(250);
/// The time that ranks have to leave their notes. On a busy machine, a rank may get no processor time for
/// seconds.
const SETTLE: Duration = Duration::from_secs(10);
/// The time that a rank stays after the verdict: if it hosts the store, so that the others can read the notes;
/// if it ends with its own error, so that the others can report it before `torchrun` notices the end of the
/// rank and ends them too.
const LINGER: Duration = Duration::from_secs(1);
/// The time that an operation may still take after another rank has failed. It may have succeeded on all ranks.
const GRACE: Duration = Duration::from_secs(1);
/// If there is no verdict after this time, the store does not answer.
const SILENCE: Duration = Duration::from_secs(15);

/// The key that indicates that some rank has left a note.
const FAILED: &str = "failed";

/// The key under which a launcher records the rank that failed, so that other ranks stop waiting for it to
/// join.
pub(super) const ENDED: &str = "ended";

/// The note of a rank after an operation has failed, on this rank or on another one.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
struct Note {
    /// The training step.
    step: u64,
    /// The number of operations that the rank has started.
    operations: u64,
    /// Whether the rank ends with its own error.
    ended: bool,
    /// The rank's error or observation; empty if the rank only reacts to other notes.
    message: String,
}

/// The conclusion from the notes.
#[derive(Debug, Clone, PartialEq)]
enum Verdict {
    /// A rank ended with its own error.
    Ended { rank: u32, step: u64, message: String, reporter: u32 },
    /// Ranks have left no note, or have started fewer operations than the others.
    Lost { ranks: Vec<u32>, cause: String, reporter: u32 },
    /// All ranks are alive and have started the same operations.
    Unexplained { message: String, reporter: u32 },
    /// The store, which no rank hosts, does not answer.
    StoreLost,
}

/// Watches the ranks of a job until it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    rank: u32,
    size: u32,
    /// Whether rank 0 hosts the store, so that both are lost together.
    hosted_by_rank_0: bool,
    step: AtomicU64,
    operations: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The note of this rank.
    note: Option<Note>,
    /// The time at which a failure was noticed.
    noticed: Option<Instant>,
    verdict: Option<Verdict>,
    dropped: bool,
}

impl Watch {
    /// Starts the thread that polls `store`.
    pub(super) fn start(store: Store, (rank, size): (u32, u32), hosted_by_rank_0: bool) -> Result<Self> {
        let shared = Arc::new(Shared {
            rank,
            size,
            hosted_by_rank_0,
            step: AtomicU64::new(0),
            operations: AtomicU64::new(0),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        });
        let watched = Arc::clone(&shared);
        // The thread is not joined, because it may hang in a call of the store forever.
        std::thread::Builder::new().name("rank-watch".to_owned()).spawn(move || watched.watch(&store))?;
        Ok(Self { shared })
    }

    /// Sets the training step of this rank.
    pub(super) fn set_step(&self, step: u64) {
        self.shared.step.store(step, Ordering::Relaxed);
    }

    /// Counts an operation that this rank starts. Fails if the job has failed.
    pub(super) fn count_operation(&self) -> Result<()> {
        let state = self.shared.lock();
        if let Some(verdict) = &state.verdict {
            return Err(self.shared.error(verdict));
        }
        drop(state);
        self.shared.operations.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Returns whether the job has failed, so that destructors must not wait for other ranks.
    pub(super) fn has_failed(&self) -> bool {
        self.shared.lock().noticed.is_some()
    }

    /// Returns the error of a pending operation if another rank failed more than [`GRACE`] ago.
    pub(super) fn overdue(&self) -> Option<Error> {
        let noticed = self.shared.lock().noticed?;
        (noticed.elapsed() > GRACE).then(|| self.shared.judged())
    }

    /// Tells the other ranks that an operation has failed. Returns this rank's error.
    pub(super) fn fail(&self, message: String) -> Error {
        self.shared.leave_note(message, false);
        self.shared.judged()
    }

    /// Tells the other ranks that this rank ends with its own error, and waits until they know.
    pub(super) fn abort(&self, message: &str) {
        self.shared.leave_note(message.to_owned(), true);
        self.shared.judged();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.lock().dropped = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    fn note(&self, message: String, ended: bool) -> Note {
        let [step, operations] = [&self.step, &self.operations].map(|count| count.load(Ordering::Relaxed));
        Note { step, operations, ended, message }
    }

    fn leave_note(&self, message: String, ended: bool) {
        let note = self.note(message, ended);
        let mut state = self.lock();
        state.note.get_or_insert(note);
        state.noticed.get_or_insert_with(Instant::now);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for the verdict. Returns this rank's error.
    fn judged(&self) -> Error {
        let state = self.lock();
        let waited = self.changed.wait_timeout_while(state, SILENCE, |state| state.verdict.is_none());
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let verdict = state.verdict.get_or_insert_with(|| self.store_lost()).clone();
        drop(state);
        self.error(&verdict)
    }

    /// Polls the store until a rank fails, then determines the verdict.
    fn watch(&self, store: &Store) {
        loop {
            let state = self.lock();
            let waiting = |state: &mut State| state.note.is_none() && !state.dropped;
            let waited = self.changed.wait_timeout_while(state, POLL, waiting);
            let state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.dropped {
                return;
            }
            let own = state.note.is_some();
            drop(state);
            let failed = own || store.has(FAILED).unwrap_or(true);
            if failed {
                break;
            }
        }
        self.lock().noticed.get_or_insert_with(Instant::now);
        let verdict = self.settle(store).unwrap_or_else(|_| self.store_lost());
        let ends = self.lock().note.as_ref().is_some_and(|note| note.ended);
        if ends || (self.hosted_by_rank_0 && self.rank == 0) {
            std::thread::sleep(LINGER);
        }
        self.lock().verdict.get_or_insert(verdict);
        self.changed.notify_all();
    }

    /// Writes this rank's note, and reads the notes of the other ranks.
    fn settle(&self, store: &Store) -> Said<Verdict> {
        let note = self.lock().note.get_or_insert_with(|| self.note(String::new(), false)).clone();
        let key = |rank: u32| format!("{FAILED}/{rank}");
        store.set(&key(self.rank), &serde_json::to_vec(&note).map_err(|error| error.to_string())?)?;
        store.set(FAILED, b"1")?;
        let mut notes = vec![None; self.size as usize];
        notes[self.rank as usize] = Some(note);
        let deadline = Instant::now() + SETTLE;
        while notes.contains(&None) && Instant::now() < deadline {
            // This must be read first: a rank writes its note before it ends, so the note is there once the end
            // is recorded.
            let ended = self.ended(store);
            for rank in 0..self.size {
                let slot = &mut notes[rank as usize];
                if slot.is_none() {
                    match store.get(&key(rank)) {
                        Ok(note) => {
                            *slot = note.map(|note| serde_json::from_slice(&note).unwrap_or_default())
                        }
                        // Rank 0 hosts the store, has reached its verdict and has ended; by then all notes were
                        // there.
                        Err(_) if notes[0].is_some() => return Ok(judge(&notes)),
                        Err(message) => return Err(message),
                    }
                }
            }
            if are_complete(&notes, ended) {
                break;
            }
            std::thread::sleep(POLL / 5);
        }
        Ok(judge(&notes))
    }

    /// Returns the first rank that a launcher has seen fail. Only a launcher that hosts the store records it.
    fn ended(&self, store: &Store) -> Option<u32> {
        if self.hosted_by_rank_0 {
            return None;
        }
        // A store that does not answer is detected where the notes are read.
        let rank = store.get(ENDED).ok()??;
        String::from_utf8_lossy(&rank).parse().ok()
    }

    /// Returns the verdict for a store that does not answer.
    fn store_lost(&self) -> Verdict {
        if self.hosted_by_rank_0 && self.rank != 0 {
            let cause = "its connections are closed, or it does not answer".to_owned();
            return Verdict::Lost { ranks: vec![0], cause, reporter: 1 };
        }
        Verdict::StoreLost
    }

    /// Converts the verdict to this rank's error.
    fn error(&self, verdict: &Verdict) -> Error {
        let elsewhere = |rank: u32, reporter: u32| Error::ReportedElsewhere { rank, reporter };
        match verdict.clone() {
            Verdict::Ended { rank, reporter, .. } if reporter != self.rank => elsewhere(rank, reporter),
            Verdict::Ended { rank, step, message, .. } => Error::rank_ended(rank, step, &message),
            Verdict::Lost { ranks, reporter, .. } if reporter != self.rank => elsewhere(ranks[0], reporter),
            Verdict::Lost { ranks, cause, .. } => {
                Error::rank_lost(&ranks, self.step.load(Ordering::Relaxed), &cause)
            }
            Verdict::Unexplained { reporter, .. } if reporter != self.rank => elsewhere(reporter, reporter),
            Verdict::Unexplained { message, .. } => Error::ranks(
                format!("all ranks are there, but {message}"),
                "look at the network between the ranks' hosts; GLOO_SOCKET_IFNAME names the interface that reaches the others",
            ),
            Verdict::StoreLost => Error::ranks(
                "the job's store does not answer: what started the ranks has ended",
                "look at the output of `torchrun` or of the command that started the ranks",
            ),
        }
    }
}

/// Returns whether all notes are there, except possibly that of a rank that has ended, so that no more notes
/// will come.
fn are_complete(notes: &[Option<Note>], ended: Option<u32>) -> bool {
    (0..).zip(notes).all(|(rank, note)| note.is_some() || Some(rank) == ended)
}

/// Determines the verdict; notes that were not left in time are `None`.
fn judge(notes: &[Option<Note>]) -> Verdict {
    let of_rank = || (0..).zip(notes);
    let reporter = |culprits: &[u32]| {
        let reports = |(rank, note): &(u32, &Option<Note>)| note.is_some() && !culprits.contains(rank);
        of_rank().find(reports).map_or(0, |(rank, _)| rank)
    };
    let ended = of_rank().find_map(|(rank, note)| Some((rank, note.as_ref().filter(|note| note.ended)?)));
    if let Some((rank, Note { step, message, .. })) = ended {
        return Verdict::Ended { rank, step: *step, message: message.clone(), reporter: reporter(&[rank]) };
    }
    let said = notes.iter().flatten().map(|note| note.message.as_str()).find(|message| !message.is_empty());
    let cause = said.unwrap_or("it does not answer").to_owned();
    let mut ranks: Vec<u32> = of_rank().filter(|(_, note)| note.is_none()).map(|(rank, _)| rank).collect();
    if ranks.is_empty() {
        // A rank that has started fewer operations than the others makes them wait.
        let operations = |note: &&Note| note.operations;
        let most = notes.iter().flatten().map(|note| operations(&note)).max().unwrap_or(0);
        let behind =
            |(_, note): &(u32, &Option<Note>)| note.as_ref().is_some_and(|note| note.operations < most);
        ranks = of_rank().filter(behind).map(|(rank, _)| rank).collect();
    }
    if ranks.is_empty() {
        return Verdict::Unexplained { message: cause, reporter: reporter(&[]) };
    }
    let reporter = reporter(&ranks);
    Verdict::Lost { ranks, cause, reporter }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(operations: u64, message: &str) -> Option<Note> {
        Some(Note { step: 7, operations, ended: false, message: message.to_owned() })
    }

    #[test]
    fn a_rank_without_a_note_is_lost_and_the_lowest_other_reports_it() {
        let closed = "`all_reduce` failed";
        let notes = [None, note(5, ""), note(5, closed), None];
        let lost = Verdict::Lost { ranks: vec![0, 3], cause: closed.to_owned(), reporter: 1 };
        assert_eq!(judge(&notes), lost);
    }

    #[test]
    fn only_a_rank_that_has_ended_is_not_waited_for() {
        let notes = [note(5, ""), None, note(5, "")];
        assert!(are_complete(&notes, Some(1)));
        assert!(!are_complete(&notes, None) && !are_complete(&notes, Some(0)));
        assert!(!are_complete(&[None, None, note(5, "")], Some(1)));
        assert!(are_complete(&[note(5, ""), note(5, "")], None));
    }

    #[test]
    fn a_rank_with_an_error_of_its_own_is_the_cause_of_all_else() {
        let ended = Note { step: 17, operations: 4, ended: true, message: "the loss is NaN".to_owned() };
        let notes = [Some(ended), note(5, "`all_reduce` failed"), None];
        let message = "the loss is NaN".to_owned();
        assert_eq!(judge(&notes), Verdict::Ended { rank: 0, step: 17, message, reporter: 1 });
    }

    #[test]
    fn a_rank_that_others_wait_for_is_lost() {
        let late = "no answer to `barrier` within 20s";
        let notes = [note(6, late), note(6, ""), note(5, "")];
        assert_eq!(judge(&notes), Verdict::Lost { ranks: vec![2], cause: late.to_owned(), reporter: 0 });
        let notes = [note(6, late), note(6, "")];
        assert_eq!(judge(&notes), Verdict::Unexplained { message: late.to_owned(), reporter: 0 });
    }
}
