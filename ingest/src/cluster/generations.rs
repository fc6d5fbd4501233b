//! What a worker holds of sessions, within a limit of memory.

use std::collections::HashMap;
use std::mem;

use foldhash::fast::RandomState;

/// What is held of a session, on the heap too.
pub(super) trait Held: Default {
    /// Estimates the bytes that it takes in memory.
    fn bytes(&self) -> usize;
}

/// What is held of sessions, in two generations: sessions seen recently and older ones. This approximates the order of
/// last use at no cost per sample.
#[derive(Debug)]
pub(super) struct Generations<T> {
    recent: HashMap<Box<[u8]>, T, RandomState>,
    older: HashMap<Box<[u8]>, T, RandomState>,
    recent_bytes: usize,
    older_bytes: usize,
    limit: usize,
}

impl<T: Held> Generations<T> {
    /// No sessions yet, which may take `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { recent: HashMap::default(), older: HashMap::default(), recent_bytes: 0, older_bytes: 0, limit }
    }

    /// Whether no session is known.
    pub(super) fn is_empty(&self) -> bool {
        self.recent.is_empty() && self.older.is_empty()
    }

    /// Estimates the bytes that all sessions take.
    pub(super) fn bytes(&self) -> usize {
        self.recent_bytes + self.older_bytes
    }

    /// Sets the bytes that all sessions may take.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// If there is no room for another session, or the recent generation `is_over`, it becomes the older one. Returns
    /// the sessions that were the older ones until then.
    pub(super) fn make_room(
        &mut self,
        is_over: bool,
    ) -> Option<impl Iterator<Item = (Box<[u8]>, T)> + use<T>> {
        if self.recent_bytes <= self.limit / 2 && !is_over {
            return None;
        }
        self.older_bytes = mem::take(&mut self.recent_bytes);
        Some(mem::replace(&mut self.older, mem::take(&mut self.recent)).into_iter())
    }

    /// What is held of a session, if it is known.
    pub(super) fn get(&self, identity: &[u8]) -> Option<&T> {
        self.recent.get(identity).or_else(|| self.older.get(identity))
    }

    /// What is held of a session; if it is not known, what `new` gives.
    pub(super) fn entry(&mut self, identity: &[u8], new: impl FnOnce() -> T) -> &mut T {
        if !self.recent.contains_key(identity) {
            let session = self.remove_older(identity).unwrap_or_else(new);
            self.insert(identity.into(), session);
        }
        self.recent.get_mut(identity).expect("the entry was inserted above")
    }

    /// Adds a session that is not known.
    pub(super) fn insert(&mut self, identity: Box<[u8]>, session: T) {
        self.recent_bytes += entry_bytes(&identity, &session);
        self.recent.insert(identity, session);
    }

    /// Removes a session, if it is known.
    pub(super) fn remove(&mut self, identity: &[u8]) -> Option<T> {
        self.remove_older(identity).or_else(|| {
            let session = self.recent.remove(identity)?;
            self.recent_bytes = self.recent_bytes.saturating_sub(entry_bytes(identity, &session));
            Some(session)
        })
    }

    fn remove_older(&mut self, identity: &[u8]) -> Option<T> {
        let session = self.older.remove(identity)?;
        self.older_bytes = self.older_bytes.saturating_sub(entry_bytes(identity, &session));
        Some(session)
    }

    /// Notes that a session seen recently takes other bytes than before.
    pub(super) fn resize(&mut self, before: usize, after: usize) {
        self.recent_bytes = (self.recent_bytes + after).saturating_sub(before);
    }

    /// Removes some sessions; none if there are none left.
    pub(super) fn take_some(&mut self) -> Vec<T> {
        let all = if self.older.is_empty() { &mut self.recent } else { &mut self.older };
        let some: Vec<Box<[u8]>> = all.keys().take(1024).cloned().collect();
        some.iter().filter_map(|identity| all.remove(identity)).collect()
    }
}

/// The bytes of a session and its identity.
fn entry_bytes<T: Held>(identity: &[u8], session: &T) -> usize {
    session.bytes() + 2 * identity.len()
}
