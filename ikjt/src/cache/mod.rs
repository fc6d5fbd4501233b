//! What readers and a preprocessing service have made and may need again: encoded columns of remote files, decoded
//! columns, and packed batches; in memory, and on a local disk.
//!
//! What to keep is decided for all three forms together. Each job says which row groups it reads, and how far it is. So
//! for every item it is known how many jobs will read it; and it is measured what the seconds are that a byte of each form
//! saves. What is worth least for a byte goes first; of equal items, the one that is read last. From memory it goes to the
//! disk if a disk gives it back faster than it is made. (Seneca, FAST 2025, divides a cache among the three forms by a model
//! of their costs; Cachew, ATC 2022, chooses one of them for each job.)
//!
//! A column that several jobs need at the same time is decoded once: the first one claims it, and the others are
//! told when it is there.

mod disk;
mod interest;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use arrow::array::ArrayRef;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use self::disk::Disk;
pub use self::interest::Interest;
use crate::Result;

/// Columns are kept only if at least so many reads are expected: memory that nothing is put into costs nothing.
const LEAST_READS: f64 = 0.25;

/// When memory is needed, this part of the limit is freed in addition, so that not every item causes a search.
const FREED_TOGETHER: u64 = 32;

/// The most items that are compared when one has to be evicted. Of more items, a sample of this size is compared:
/// comparing all of them under the lock would block other users of the cache for long.
const COMPARED: usize = 4096;

/// What waits to be written to disk takes at most the limit divided by this, and one item.
const QUEUED_SHARE: u64 = 16;

/// What seconds to make a byte are taken to be until they are measured: 200 MB a second.
const FIRST_RATE: f64 = 5e-9;

/// Steps of a job that are computed together.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Block {
    /// A name for the job, which decides the bytes of its batches.
    pub job: String,
    /// The epoch.
    pub epoch: u64,
    /// The steps of the epoch.
    pub steps: Range<u64>,
}

/// A column of a row group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Chunk {
    /// The path of the data file in its dataset: no two writers make the same one.
    pub(crate) file: Arc<str>,
    /// The number of the row group in the file.
    pub(crate) row_group: usize,
    /// The column's name.
    pub(crate) column: Arc<str>,
}

/// The key of an item, and its form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    Encoded(Chunk),
    Decoded(Chunk),
    Batches(Block),
}

impl Key {
    fn form(&self) -> Form {
        match self {
            Self::Encoded(_) => Form::Encoded,
            Self::Decoded(_) => Form::Decoded,
            Self::Batches(_) => Form::Batches,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Encoded,
    Decoded,
    Batches,
}

/// Something that is stored.
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

/// Figures of a cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheFigures {
    /// Bytes in memory.
    pub cached_bytes: u64,
    /// Bytes on disk.
    pub cached_bytes_on_disk: u64,
    /// Encoded columns that need not be fetched from an object store.
    pub encoded_hits: u64,
    /// Columns that need not be decoded.
    pub decoded_hits: u64,
    /// Blocks of batches that need not be computed.
    pub block_hits: u64,
    /// Hits of all forms that came from disk.
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
    /// Bytes within the limit that are not the cache's.
    others: u64,
    interests: Vec<Weak<Interest>>,
    rates: Rates,
    figures: CacheFigures,
    /// Columns that are being decoded, and who waits for them.
    claimed: HashMap<Chunk, Vec<Waiter>>,
    /// How often items were compared.
    comparisons: usize,
}

/// An item, in memory, on disk, or both.
#[derive(Debug)]
struct Stored {
    memory: Option<Item>,
    file: Option<u64>,
    bytes: u64,
    /// Whose batches these are, and where in the epoch they are read.
    owner: Option<(Weak<Interest>, f32)>,
}

/// Is given a column, or told that it must be decoded again.
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

/// Seconds that a byte takes, on average over what was measured.
#[derive(Debug, Clone, Copy, Default)]
struct Rate {
    seconds: f64,
    bytes: f64,
}

impl Rate {
    fn add(&mut self, seconds: f64, bytes: u64) {
        // What was long ago counts less: storage may become slower, pipelines longer.
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

#[derive(Debug, Default)]
struct Rates {
    encoded: Rate,
    decoded: Rate,
    batches: Rate,
    /// Reading from disk.
    disk: Rate,
}

impl Rates {
    fn of(&mut self, form: Form) -> &mut Rate {
        match form {
            Form::Encoded => &mut self.encoded,
            Form::Decoded => &mut self.decoded,
            Form::Batches => &mut self.batches,
        }
    }

    fn get(&self, form: Form) -> f64 {
        match form {
            Form::Encoded => self.encoded.get(),
            Form::Decoded => self.decoded.get(),
            Form::Batches => self.batches.get(),
        }
    }
}

/// What keeping an item saves: seconds for a byte, and how far away the next read is, as a part of an epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Worth {
    reads: f64,
    seconds: f64,
    distance: f32,
}

impl Worth {
    /// The item that is worth less first.
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
        Worth { reads, seconds: reads * self.rates.get(key.form()), distance }
    }

    /// Items of which `is_there` says that they may go, the least worth first. Where there are many, other ones in each of
    /// some calls.
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

    /// Takes an item out of memory; it stays known if it is on disk.
    fn forget_memory(&mut self, key: &Key) -> Option<Item> {
        let stored = self.items.get_mut(key)?;
        let (item, bytes, stays) = (stored.memory.take()?, stored.bytes, stored.file.is_some());
        self.memory -= bytes;
        if !stays {
            self.items.remove(key);
        }
        Some(item)
    }

    /// Takes an item off the disk; the number of its file.
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

/// An item that leaves memory for the disk.
type Leaving = (Key, Item, Option<(Weak<Interest>, f32)>);

impl Cache {
    /// A cache of at most `memory_limit` bytes in memory and, below a folder, so many on disk.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the folder cannot be made or cleared.
    pub fn new(memory_limit: u64, disk: Option<(&Path, u64)>) -> Result<Arc<Self>> {
        let open = |(folder, limit)| Disk::open(folder, limit, memory_limit / QUEUED_SHARE);
        let disk = disk.map(open).transpose()?;
        Ok(Arc::new(Self { memory_limit, disk, state: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cache's figures.
    pub fn figures(&self) -> CacheFigures {
        let state = self.state();
        CacheFigures { cached_bytes: state.memory, cached_bytes_on_disk: state.on_disk, ..state.figures }
    }

    /// Why something could not be written to the disk since the last call. It is lost, which costs only time.
    pub fn take_disk_failure(&self) -> Option<std::io::Error> {
        self.disk.as_ref()?.take_failure()
    }

    /// Removes what is on disk; nothing comes there any more. Dropping the cache does so, too.
    pub fn close(&self) {
        self.disk.iter().for_each(Disk::close);
    }

    /// Bytes within the limit that are used otherwise; the cache gives up what it has above the rest.
    pub fn leave(self: &Arc<Self>, others: u64) {
        let mut state = self.state();
        state.others = others;
        let over = state.memory.saturating_add(others).saturating_sub(self.memory_limit).min(state.memory);
        if over > 0 {
            let leaving = self.free(&mut state, over, None);
            drop(state);
            self.write(leaving);
        }
    }

    /// A job's interest counts from here on, as long as it lives.
    pub(crate) fn add_interest(&self, interest: &Arc<Interest>) {
        let mut state = self.state();
        state.interests.retain(|interest| interest.strong_count() > 0);
        state.interests.push(Arc::downgrade(interest));
    }

    /// Frees `bytes` of memory: what is worth least, and less than `than`. What is to go to the disk.
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
                let seconds = state.rates.get(key.form());
                if self.disk.is_some()
                    && !on_disk
                    && worth.reads >= LEAST_READS
                    && seconds > state.rates.disk.get()
                {
                    leaving.push((key, item, owner));
                }
            }
            if freed >= bytes || freed == before {
                return leaving;
            }
        }
    }

    /// Keeps an item if it is worth more than what has to go for it. `made` says what it took to make, unless the item
    /// comes from a cache.
    fn put(
        self: &Arc<Self>,
        key: Key,
        item: Item,
        owner: Option<(Weak<Interest>, f32)>,
        made: Option<Duration>,
    ) {
        let bytes = item.bytes();
        let mut state = self.state();
        if let Some(made) = made {
            state.rates.of(key.form()).add(made.as_secs_f64(), bytes);
        }
        let worth = state.worth(&key, owner.as_ref(), Instant::now());
        let is_batches = key.form() == Form::Batches;
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
            // One number for memory and disk, though a column may take other bytes when it comes from there.
            let bytes = stored.bytes;
            state.memory += bytes;
        } else if worth.reads >= LEAST_READS && !state.items.contains_key(&key) {
            leaving.push((key, item, owner));
        }
        drop(state);
        self.write(leaving);
    }

    /// An item in memory or, if it is to be read now, on disk.
    fn get(&self, key: &Key) -> Option<Item> {
        let file = {
            let mut state = self.state();
            let stored = state.items.get(key)?;
            let (memory, file) = (stored.memory.clone(), stored.file);
            if memory.is_some() {
                state.count(key.form(), false);
                return memory;
            }
            file?
        };
        let (disk, started) = (self.disk.as_ref()?, Instant::now());
        let item = disk.read(file);
        let mut state = self.state();
        match &item {
            Some(item) => {
                state.rates.disk.add(started.elapsed().as_secs_f64(), item.bytes());
                state.count(key.form(), true);
            }
            // The file was removed meanwhile, or damaged.
            None => {
                state.forget_file(key);
            }
        }
        item
    }

    /// Writes items to the disk, as far as it keeps up.
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

    /// An item is on disk now. What is worth least there goes.
    fn written(&self, key: Key, bytes: u64, owner: Option<(Weak<Interest>, f32)>, file: u64) {
        let Some(disk) = &self.disk else { return };
        let mut state = self.state();
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

impl State {
    fn count(&mut self, form: Form, from_disk: bool) {
        let hits = match form {
            Form::Encoded => &mut self.figures.encoded_hits,
            Form::Decoded => &mut self.figures.decoded_hits,
            Form::Batches => &mut self.figures.block_hits,
        };
        *hits += 1;
        self.figures.disk_hits += u64::from(from_disk);
    }
}

/// Batches of blocks.
impl Cache {
    /// Keeps the parts of a block, which the job with this interest reads after the share `share` of its epoch. They took
    /// `made` to compute; `None` if they come from a cache, because the costs of computing are learned from it.
    pub fn put_block(
        self: &Arc<Self>,
        block: Block,
        parts: Vec<Bytes>,
        (interest, share): (&Arc<Interest>, f32),
        made: Option<Duration>,
    ) {
        self.put(Key::Batches(block), Item::Bytes(parts), Some((Arc::downgrade(interest), share)), made);
    }

    /// Takes the parts of a block; they are no longer the cache's.
    pub fn take_block(&self, block: &Block) -> Option<Vec<Bytes>> {
        let key = Key::Batches(block.clone());
        let item = self.get(&key)?;
        self.state().forget_memory(&key);
        match item {
            Item::Bytes(parts) => Some(parts),
            Item::Column(_) => None,
        }
    }
}

/// Where a column is.
pub(crate) enum Found {
    /// In memory.
    Here(ArrayRef),
    /// On disk: [`Cache::column`] reads it.
    OnDisk,
    /// Somebody is decoding it, and the waiter will be told.
    Coming,
    /// It must be decoded; others wait for it meanwhile.
    Claimed(Claim),
}

/// The right to decode a column. Dropped, it tells those who wait to decode it themselves.
#[derive(Debug)]
pub(crate) struct Claim {
    cache: Arc<Cache>,
    pub(crate) chunk: Chunk,
}

impl Claim {
    /// The column is decoded, which took `made`.
    pub(crate) fn fulfil(self, column: &ArrayRef, made: Duration) {
        let chunk = self.chunk.clone();
        self.cache.put(Key::Decoded(chunk), Item::Column(Arc::clone(column)), None, Some(made));
        self.tell(Some(column));
    }

    fn tell(&self, column: Option<&ArrayRef>) {
        let waiters = self.cache.state().claimed.remove(&self.chunk);
        let waiters = waiters.unwrap_or_default();
        if column.is_some() && !waiters.is_empty() {
            self.cache.state().figures.decoded_hits += waiters.len() as u64;
        }
        waiters.into_iter().for_each(|waiter| (waiter.0)(column.cloned()));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.tell(None);
    }
}

/// Columns of row groups.
impl Cache {
    /// Finds columns, and claims those that are not there and that nobody has claimed: all at the same time, so that
    /// whoever waits for a column waits for somebody who came earlier, and no two wait for each other. `waiter` makes what
    /// is told of a column that somebody else is decoding.
    pub(crate) fn find(
        self: &Arc<Self>,
        chunks: Vec<Chunk>,
        waiter: impl Fn(&Chunk) -> Waiter,
    ) -> Vec<(Chunk, Found)> {
        let mut state = self.state();
        let mut find = |chunk: &Chunk| {
            let key = Key::Decoded(chunk.clone());
            match state.items.get(&key).map(|stored| stored.memory.clone()) {
                Some(Some(Item::Column(column))) => {
                    state.count(Form::Decoded, false);
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

    /// A decoded column.
    pub(crate) fn column(&self, chunk: &Chunk) -> Option<ArrayRef> {
        match self.get(&Key::Decoded(chunk.clone()))? {
            Item::Column(column) => Some(column),
            Item::Bytes(_) => None,
        }
    }

    /// The bytes of an encoded column.
    pub(crate) fn encoded(&self, chunk: &Chunk) -> Option<Bytes> {
        match self.get(&Key::Encoded(chunk.clone()))? {
            Item::Bytes(parts) => parts.into_iter().next(),
            Item::Column(_) => None,
        }
    }

    /// Keeps the bytes of an encoded column, which took `made` to fetch.
    pub(crate) fn put_encoded(self: &Arc<Self>, chunk: Chunk, bytes: Bytes, made: Duration) {
        self.put(Key::Encoded(chunk), Item::Bytes(vec![bytes]), None, Some(made));
    }
}

#[cfg(test)]
mod tests;
