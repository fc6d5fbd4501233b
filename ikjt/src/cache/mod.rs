//! A cache of data that readers and a preprocessing service have made and may need again: encoded columns of remote
//! files, decoded columns, and packed batches. Items are in memory or on a local disk.
//!
//! One policy covers all three forms. Each job reports which row groups it reads and its progress, which determines
//! how many jobs will read each item. The cache also measures the seconds that a cached byte of each form saves. The
//! item that saves the least time per byte is evicted first; among equal items, the one that is read last. An item
//! that is evicted from memory moves to the disk if reading it from there is faster than making it again. (Seneca,
//! FAST 2025, divides a cache among the three forms by a cost model; Cachew, ATC 2022, chooses one of them for each
//! job.)
//!
//! If several jobs need a column at the same time, it is decoded once: the first job claims it, and the others are
//! notified when it is decoded.

mod disk;
mod interest;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use arrow::array::ArrayRef;
use bytes::Bytes;
use onefold_base::sync::locked;
use serde::{Deserialize, Serialize};

use self::disk::Disk;
pub use self::interest::Interest;
use crate::error::Result;

/// The least expected reads of an item that is worth storing. Unused memory costs nothing, so other columns are not
/// kept.
const LEAST_READS: f64 = 0.25;

/// The fraction of the limit (1 / this number) that is freed beyond the needed memory, so that not every new item
/// causes a search.
const FREED_TOGETHER: u64 = 32;

/// The maximal number of items that are compared to find items to evict. If there are more, a sample of this size is
/// compared, because comparing all of them under the lock would block other users of the cache for too long.
const COMPARED: usize = 4096;

/// The write queue holds at most the memory limit divided by this number, or one item.
const QUEUED_SHARE: u64 = 16;

/// The assumed seconds to make a byte until there are measurements: 200 MB/s.
const FIRST_RATE: f64 = 5e-9;

/// Consecutive steps of a job that are computed together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Block {
    /// The name of the job. Jobs with equal names have equal batches.
    pub job: String,
    /// The epoch.
    pub epoch: u64,
    /// The steps of the epoch.
    pub steps: Range<u64>,
}

/// A column of a row group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Chunk {
    /// The path of the data file in its dataset. Paths are unique, because writers never reuse a name.
    pub(crate) file: Arc<str>,
    /// The number of the row group in the file.
    pub(crate) row_group: usize,
    /// The column's name.
    pub(crate) column: Arc<str>,
}

/// The key of an item. The variant is the form of the item.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Encoded(Chunk),
    Decoded(Chunk),
    Batches(Block),
}

/// The number of forms.
const FORMS: usize = 3;

impl Key {
    /// Returns the index of the form in arrays of [`FORMS`] entries.
    fn form(&self) -> usize {
        match self {
            Self::Encoded(_) => 0,
            Self::Decoded(_) => 1,
            Self::Batches(_) => 2,
        }
    }
}

/// The content of a stored item.
#[derive(Debug, Clone)]
enum Item {
    Bytes(Vec<Bytes>),
    Column(ArrayRef),
}

impl Item {
    fn bytes(&self) -> u64 {
        match self {
            Self::Bytes(parts) => parts.iter().map(|part| part.len() as u64).sum(),
            Self::Column(column) => column.get_array_memory_size() as u64,
        }
    }
}

/// Statistics of a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheFigures {
    /// The size of the items in memory, in bytes.
    pub cached_bytes: u64,
    /// The size of the items on disk, in bytes.
    pub cached_bytes_on_disk: u64,
    /// The number of encoded columns that came from the cache instead of an object store.
    pub encoded_hits: u64,
    /// The number of columns that did not have to be decoded.
    pub decoded_hits: u64,
    /// The number of blocks of batches that did not have to be computed.
    pub block_hits: u64,
    /// The number of hits of all forms that came from disk.
    pub disk_hits: u64,
}

/// A cache; see the [module](self).
#[derive(Debug)]
pub struct Cache {
    memory_limit: u64,
    disk: Option<Disk>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    items: HashMap<Key, Stored>,
    memory: u64,
    on_disk: u64,
    /// The number of bytes within the limit that are used for other purposes than the cache.
    others: u64,
    interests: Vec<Weak<Interest>>,
    /// The rates of making the items of each form, and of reading from disk.
    rates: [Rate; FORMS],
    disk_rate: Rate,
    /// The hits of each form, and the hits of all forms that came from disk.
    hits: [u64; FORMS],
    disk_hits: u64,
    /// The columns that are being decoded, and the waiters for each of them.
    claimed: HashMap<Chunk, Vec<Waiter>>,
    /// How often items were compared. Successive comparisons use different samples of the items.
    comparisons: usize,
}

/// An item, in memory, on disk, or both.
#[derive(Debug)]
struct Stored {
    memory: Option<Item>,
    file: Option<u64>,
    bytes: u64,
    /// For batches, the interest of the job that they belong to, and their position in the epoch.
    owner: Option<(Weak<Interest>, f32)>,
}

/// A callback that receives a decoded column, or `None` if the receiver must decode it.
pub(crate) struct Waiter(Box<dyn FnOnce(Option<ArrayRef>) + Send>);

impl Waiter {
    pub(crate) fn new(told: impl FnOnce(Option<ArrayRef>) + Send + 'static) -> Self {
        Self(Box::new(told))
    }
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Waiter")
    }
}

/// The average seconds per byte over the measurements.
#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    seconds: f64,
    bytes: f64,
}

impl Rate {
    fn add(&mut self, seconds: f64, bytes: u64) {
        // Halves the weight of old measurements, because the speed of storage and pipelines changes over time.
        if self.bytes > 1e9 {
            (self.seconds, self.bytes) = (self.seconds / 2.0, self.bytes / 2.0);
        }
        self.seconds += seconds;
        self.bytes += bytes as f64;
    }

    fn get(self) -> f64 {
        if self.bytes > 0.0 { self.seconds / self.bytes } else { FIRST_RATE }
    }
}

/// The value of keeping an item: the expected reads, the seconds saved per byte, and the distance to the next read as
/// a share of an epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Worth {
    reads: f64,
    seconds: f64,
    distance: f32,
}

impl Worth {
    /// Orders items by value; the item to evict first is the least.
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.seconds.total_cmp(&other.seconds).then(other.distance.total_cmp(&self.distance))
    }
}

impl State {
    fn worth(&self, key: &Key, owner: Option<&(Weak<Interest>, f32)>, now: Instant) -> Worth {
        let (mut reads, mut distance) = (0.0, f32::MAX);
        let mut add = |(more, next): (f64, f32)| {
            reads += more;
            distance = distance.min(next);
        };
        match (key, owner) {
            (Key::Batches(_), Some((owner, share))) => {
                if let Some(owner) = owner.upgrade() {
                    add(owner.batches(*share, now));
                }
            }
            (Key::Batches(_), None) => (),
            (Key::Encoded(chunk) | Key::Decoded(chunk), _) => {
                for interest in self.interests.iter().filter_map(Weak::upgrade) {
                    add(interest.columns(chunk, now));
                }
            }
        }
        Worth { reads, seconds: reads * self.rates[key.form()].get(), distance }
    }

    fn count(&mut self, key: &Key, from_disk: bool) {
        self.hits[key.form()] += 1;
        self.disk_hits += u64::from(from_disk);
    }

    /// Returns the items for which `is_there` is true, in ascending order of value. If there are more than
    /// [`COMPARED`], it returns a sample of them, and successive calls return different samples.
    fn by_worth(&mut self, is_there: fn(&Stored) -> bool) -> Vec<(Worth, Key)> {
        let now = Instant::now();
        let there = || self.items.iter().filter(move |(_, stored)| is_there(stored));
        let parts = there().count().div_ceil(COMPARED).max(1);
        let part = there().skip(self.comparisons % parts).step_by(parts);
        let mut items: Vec<_> =
            part.map(|(key, stored)| (self.worth(key, stored.owner.as_ref(), now), key.clone())).collect();
        self.comparisons = self.comparisons.wrapping_add(1);
        items.sort_by(|(a, _), (b, _)| a.cmp(b));
        items
    }

    /// Removes an item from memory. Its entry remains if the item is also on disk.
    fn forget_memory(&mut self, key: &Key) -> Option<Item> {
        let stored = self.items.get_mut(key)?;
        let (item, bytes, stays) = (stored.memory.take()?, stored.bytes, stored.file.is_some());
        self.memory -= bytes;
        if !stays {
            self.items.remove(key);
        }
        Some(item)
    }

    /// Removes an item's file from its entry, and returns the number of the file. The caller deletes the file.
    fn forget_file(&mut self, key: &Key) -> Option<u64> {
        let stored = self.items.get_mut(key)?;
        let (file, bytes, stays) = (stored.file.take()?, stored.bytes, stored.memory.is_some());
        self.on_disk -= bytes;
        if !stays {
            self.items.remove(key);
        }
        Some(file)
    }
}

/// An item that moves from memory to the disk.
type Leaving = (Key, Item, Option<(Weak<Interest>, f32)>);

impl Cache {
    /// Creates a cache of at most `memory_limit` bytes in memory and, if `disk` is given, of at most a number of
    /// bytes below a folder.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the folder cannot be created or cleared.
    pub fn new(memory_limit: u64, disk: Option<(&Path, u64)>) -> Result<Arc<Self>> {
        let open = |(folder, limit)| Disk::open(folder, limit, memory_limit / QUEUED_SHARE);
        let disk = disk.map(open).transpose()?;
        Ok(Arc::new(Self { memory_limit, disk, state: Mutex::default() }))
    }

    /// Returns the cache's figures.
    pub fn figures(&self) -> CacheFigures {
        let state = locked(&self.state);
        let [encoded_hits, decoded_hits, block_hits] = state.hits;
        CacheFigures {
            cached_bytes: state.memory,
            cached_bytes_on_disk: state.on_disk,
            encoded_hits,
            decoded_hits,
            block_hits,
            disk_hits: state.disk_hits,
        }
    }

    /// Returns the last error of writing to the disk since the previous call. The item is lost, which costs only
    /// time.
    pub fn take_disk_failure(&self) -> Option<std::io::Error> {
        self.disk.as_ref()?.take_failure()
    }

    /// Removes all items on disk, and stops writing to it. Dropping the cache does the same.
    pub fn close(&self) {
        self.disk.iter().for_each(Disk::close);
    }

    /// Sets the number of bytes within the limit that are used for other purposes, and evicts items that no longer
    /// fit.
    pub fn leave(self: &Arc<Self>, others: u64) {
        let mut state = locked(&self.state);
        state.others = others;
        let over = state.memory.saturating_add(others).saturating_sub(self.memory_limit).min(state.memory);
        if over > 0 {
            let leaving = self.free(&mut state, over, None);
            drop(state);
            self.write(leaving);
        }
    }

    /// Registers a job's interest. It counts until it is dropped.
    pub(crate) fn add_interest(&self, interest: &Arc<Interest>) {
        let mut state = locked(&self.state);
        state.interests.retain(|interest| interest.strong_count() > 0);
        state.interests.push(Arc::downgrade(interest));
    }

    /// Frees at least `bytes` of memory if possible, by evicting the items of the least value that are less valuable
    /// than `than`. Returns the evicted items that should move to the disk.
    fn free(&self, state: &mut State, bytes: u64, than: Option<Worth>) -> Vec<Leaving> {
        let wanted = bytes.saturating_add(self.memory_limit / FREED_TOGETHER);
        let (mut freed, mut leaving) = (0, Vec::new());
        loop {
            let before = freed;
            for (worth, key) in state.by_worth(|stored| stored.memory.is_some()) {
                let is_less = than.is_none_or(|than| worth.cmp(&than).is_lt());
                if freed >= wanted || !is_less {
                    break;
                }
                let Some(stored) = state.items.get(&key) else { continue };
                let (on_disk, owner) = (stored.file.is_some(), stored.owner.clone());
                freed += stored.bytes;
                let Some(item) = state.forget_memory(&key) else { continue };
                let seconds = state.rates[key.form()].get();
                if self.disk.is_some()
                    && !on_disk
                    && worth.reads >= LEAST_READS
                    && seconds > state.disk_rate.get()
                {
                    leaving.push((key, item, owner));
                }
            }
            if freed >= bytes || freed == before {
                return leaving;
            }
        }
    }

    /// Stores an item, unless that would evict more valuable items. `made` is the time that it took to make the item,
    /// or `None` if the item comes from another cache.
    fn put(
        self: &Arc<Self>,
        key: Key,
        item: Item,
        owner: Option<(Weak<Interest>, f32)>,
        made: Option<Duration>,
    ) {
        let bytes = item.bytes();
        let mut state = locked(&self.state);
        if let Some(made) = made {
            state.rates[key.form()].add(made.as_secs_f64(), bytes);
        }
        let worth = state.worth(&key, owner.as_ref(), Instant::now());
        let is_batches = matches!(key, Key::Batches(_));
        let is_known = state.items.get(&key).is_some_and(|stored| stored.memory.is_some());
        if is_known || (!is_batches && worth.reads < LEAST_READS) {
            return;
        }
        let mut leaving = Vec::new();
        let over =
            state.memory.saturating_add(state.others).saturating_add(bytes).saturating_sub(self.memory_limit);
        if over > 0 {
            leaving = self.free(&mut state, over, Some(worth));
        }
        if over == 0 || state.memory.saturating_add(state.others).saturating_add(bytes) <= self.memory_limit {
            let new = Stored { memory: None, file: None, bytes, owner: None };
            let stored = state.items.entry(key).or_insert(new);
            (stored.memory, stored.owner) = (Some(item), owner);
            // Uses the size recorded first for memory and disk, though a column that is read from disk may have
            // another size.
            let bytes = stored.bytes;
            state.memory += bytes;
        } else if worth.reads >= LEAST_READS && !state.items.contains_key(&key) {
            leaving.push((key, item, owner));
        }
        drop(state);
        self.write(leaving);
    }

    /// Returns an item from memory or, by reading it now, from disk.
    fn get(&self, key: &Key) -> Option<Item> {
        let file = {
            let mut state = locked(&self.state);
            let stored = state.items.get(key)?;
            let (memory, file) = (stored.memory.clone(), stored.file);
            if memory.is_some() {
                state.count(key, false);
                return memory;
            }
            file?
        };
        let (disk, started) = (self.disk.as_ref()?, Instant::now());
        let item = disk.read(file);
        let mut state = locked(&self.state);
        match &item {
            Some(item) => {
                state.disk_rate.add(started.elapsed().as_secs_f64(), item.bytes());
                state.count(key, true);
            }
            // The file was removed in the meantime, or is damaged.
            None => {
                state.forget_file(key);
            }
        }
        item
    }

    /// Queues items for writing to the disk. Items that do not fit into the queue are lost.
    fn write(self: &Arc<Self>, leaving: Vec<Leaving>) {
        let Some(disk) = &self.disk else { return };
        for (key, item, owner) in leaving {
            let (cache, bytes) = (Arc::downgrade(self), item.bytes());
            disk.write(item, bytes, move |file| {
                if let Some(cache) = cache.upgrade() {
                    cache.written(key, bytes, owner, file);
                }
            });
        }
    }

    /// Records that an item is on disk, and evicts the least valuable files if the limit is exceeded.
    fn written(&self, key: Key, bytes: u64, owner: Option<(Weak<Interest>, f32)>, file: u64) {
        let Some(disk) = &self.disk else { return };
        let mut state = locked(&self.state);
        let known = state.items.entry(key).or_insert(Stored { memory: None, file: None, bytes, owner });
        if known.file.is_some() {
            disk.remove(file);
            return;
        }
        known.file = Some(file);
        let bytes = known.bytes;
        state.on_disk += bytes;
        if state.on_disk <= disk.limit() {
            return;
        }
        loop {
            let before = state.on_disk;
            for (_, key) in state.by_worth(|stored| stored.file.is_some()) {
                if state.on_disk <= disk.limit() - disk.limit() / FREED_TOGETHER {
                    break;
                }
                if let Some(file) = state.forget_file(&key) {
                    disk.remove(file);
                }
            }
            if state.on_disk <= disk.limit() || state.on_disk == before {
                return;
            }
        }
    }
}

/// Operations on blocks of batches.
impl Cache {
    /// Stores the parts of a block. The job with this interest reads the block at the position `share` of its epoch.
    /// `made` is the time that it took to compute the block. It is `None` if the parts come from another cache,
    /// because the cache learns the cost of computing from it.
    pub fn put_block(
        self: &Arc<Self>,
        block: Block,
        parts: Vec<Bytes>,
        (interest, share): (&Arc<Interest>, f32),
        made: Option<Duration>,
    ) {
        self.put(Key::Batches(block), Item::Bytes(parts), Some((Arc::downgrade(interest), share)), made);
    }

    /// Returns whether the parts of a block are on disk and not in memory.
    pub fn has_on_disk(&self, block: &Block) -> bool {
        let key = Key::Batches(block.clone());
        locked(&self.state).items.get(&key).is_some_and(|stored| stored.memory.is_none())
    }

    /// Returns the parts of a block, and removes them from the memory of the cache.
    pub fn take_block(&self, block: &Block) -> Option<Vec<Bytes>> {
        let key = Key::Batches(block.clone());
        let item = self.get(&key)?;
        locked(&self.state).forget_memory(&key);
        match item {
            Item::Bytes(parts) => Some(parts),
            Item::Column(_) => None,
        }
    }
}

/// The state of a column in the cache.
pub(crate) enum Found {
    /// The column is in memory.
    Here(ArrayRef),
    /// The column is on disk; [`Cache::column`] reads it.
    OnDisk,
    /// Another caller is decoding the column; the waiter will be called.
    Coming,
    /// The caller must decode the column; other callers may wait for it.
    Claimed(Claim),
}

/// The right to decode a column. If it is dropped without [`fulfil`](Self::fulfil), the waiters are told to decode
/// the column themselves.
#[derive(Debug)]
pub(crate) struct Claim {
    cache: Arc<Cache>,
    pub(crate) chunk: Chunk,
}

impl Claim {
    /// Stores the decoded column and passes it to the waiters. Decoding took `made`.
    pub(crate) fn fulfil(self, column: &ArrayRef, made: Duration) {
        let chunk = self.chunk.clone();
        self.cache.put(Key::Decoded(chunk), Item::Column(Arc::clone(column)), None, Some(made));
        self.tell(Some(column));
    }

    fn tell(&self, column: Option<&ArrayRef>) {
        let mut state = locked(&self.cache.state);
        let waiters = state.claimed.remove(&self.chunk).unwrap_or_default();
        if column.is_some() {
            state.hits[Key::Decoded(self.chunk.clone()).form()] += waiters.len() as u64;
        }
        drop(state);
        waiters.into_iter().for_each(|waiter| (waiter.0)(column.cloned()));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.tell(None);
    }
}

/// Operations on columns of row groups.
impl Cache {
    /// Looks up columns, and claims those that are neither cached nor claimed by another caller. All columns are
    /// handled under one lock, so callers wait only for earlier callers, and no two callers wait for each other.
    /// `waiter` creates the callback for a column that another caller is decoding.
    pub(crate) fn find(
        self: &Arc<Self>,
        chunks: Vec<Chunk>,
        waiter: impl Fn(&Chunk) -> Waiter,
    ) -> Vec<(Chunk, Found)> {
        let mut state = locked(&self.state);
        let mut find = |chunk: &Chunk| {
            let key = Key::Decoded(chunk.clone());
            match state.items.get(&key).map(|stored| stored.memory.clone()) {
                Some(Some(Item::Column(column))) => {
                    state.count(&key, false);
                    return Found::Here(column);
                }
                Some(_) => return Found::OnDisk,
                None => (),
            }
            if let Some(waiters) = state.claimed.get_mut(chunk) {
                waiters.push(waiter(chunk));
                return Found::Coming;
            }
            state.claimed.insert(chunk.clone(), Vec::new());
            Found::Claimed(Claim { cache: Arc::clone(self), chunk: chunk.clone() })
        };
        let found = |chunk: Chunk| {
            let found = find(&chunk);
            (chunk, found)
        };
        chunks.into_iter().map(found).collect()
    }

    /// Returns a decoded column from memory or disk.
    pub(crate) fn column(&self, chunk: &Chunk) -> Option<ArrayRef> {
        match self.get(&Key::Decoded(chunk.clone()))? {
            Item::Column(column) => Some(column),
            Item::Bytes(_) => None,
        }
    }

    /// Returns the bytes of an encoded column.
    pub(crate) fn encoded(&self, chunk: &Chunk) -> Option<Bytes> {
        match self.get(&Key::Encoded(chunk.clone()))? {
            Item::Bytes(parts) => parts.into_iter().next(),
            Item::Column(_) => None,
        }
    }

    /// Stores the bytes of an encoded column. Fetching them took `made`.
    pub(crate) fn put_encoded(self: &Arc<Self>, chunk: Chunk, bytes: Bytes, made: Duration) {
        self.put(Key::Encoded(chunk), Item::Bytes(vec![bytes]), None, Some(made));
    }
}

#[cfg(test)]
mod tests;
