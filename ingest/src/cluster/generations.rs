//! A cache of per-session state with a memory limit.

use std::collections::HashMap;
use std::mem;

use foldhash::fast::RandomState;

/// State of a session.
pub(super) trait Held: Default {
    /// Estimates its memory in bytes, including the heap.
    fn bytes(&self) -> usize;
}

/// A map from session to state, in two generations: sessions that were seen recently, and older ones. This
/// approximates LRU order at no cost per sample.
#[derive(Debug)]
pub(super) struct Generations<T> {
    recent: HashMap<Box<[u8]>, T, RandomState>,
    older: HashMap<Box<[u8]>, T, RandomState>,
    recent_bytes: usize,
    older_bytes: usize,
    limit: usize,
}

impl<T: Held> Generations<T> {
    /// Creates an empty cache with a limit of `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { recent: HashMap::default(), older: HashMap::default(), recent_bytes: 0, older_bytes: 0, limit }
    }

    /// Whether the cache has no sessions.
    pub(super) fn is_empty(&self) -> bool {
        self.recent.is_empty() && self.older.is_empty()
    }

    /// Estimates the memory of all sessions, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.recent_bytes + self.older_bytes
    }

    /// Sets the memory limit of all sessions, in bytes.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Starts a new generation if there is no room for another session or if the recent generation `is_over`.
    /// Returns the sessions of the dropped generation.
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

    /// Returns the state of a session, if it is in the cache.
    pub(super) fn get(&self, identity: &[u8]) -> Option<&T> {
        self.recent.get(identity).or_else(|| self.older.get(identity))
    }

    /// Returns the state of a session and moves the session to the recent generation. Inserts the result of `new`
    /// if the session is not in the cache.
    pub(super) fn entry(&mut self, identity: &[u8], new: impl FnOnce() -> T) -> &mut T {
        if !self.recent.contains_key(identity) {
            let session = self.remove_older(identity).unwrap_or_else(new);
            self.insert(identity.into(), session);
        }
        self.recent.get_mut(identity).expect("the entry was inserted above")
    }

    /// Inserts a session that is not in the cache.
    pub(super) fn insert(&mut self, identity: Box<[u8]>, session: T) {
        self.recent_bytes += entry_bytes(&identity, &session);
        self.recent.insert(identity, session);
    }

    /// Removes a session and returns its state, if it is in the cache.
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

    /// Updates the memory use after a session of the recent generation changed its size from `before` to `after`
    /// bytes.
    pub(super) fn resize(&mut self, before: usize, after: usize) {
        self.recent_bytes = (self.recent_bytes + after).saturating_sub(before);
    }

    /// Removes up to 1024 sessions and returns their states. Returns an empty vector if the cache is empty.
    pub(super) fn take_some(&mut self) -> Vec<T> {
        let all = if self.older.is_empty() { &mut self.recent } else { &mut self.older };
        let some: Vec<Box<[u8]>> = all.keys().take(1024).cloned().collect();
        some.iter().filter_map(|identity| all.remove(identity)).collect()
    }
}

/// Estimates the memory of a session and its key, in bytes.
fn entry_bytes<T: Held>(identity: &[u8], session: &T) -> usize {
    session.bytes() + 2 * identity.len()
}
