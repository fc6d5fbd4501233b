use std::collections::HashSet;
use std::sync::mpsc;

use arrow::array::Int64Array;

use super::*;

const KILOBYTE: u64 = 1024;

fn chunk(row_group: usize, column: &str) -> Chunk {
    Chunk { file: "file".into(), row_group, column: column.into() }
}

/// Returns a column of about one kilobyte.
fn column(value: i64) -> ArrayRef {
    Arc::new(Int64Array::from(vec![value; 116]))
}

/// Adds the interest in one column of ten row groups, in the order `order`.
fn interest(cache: &Cache, order: &[usize], column: &str, repeats: bool) -> Arc<Interest> {
    let place = |(i, row_group): (usize, &usize)| (("file".into(), *row_group), i as f32 / 10.0);
    let columns = HashSet::from([column.to_owned()]);
    let places = order.iter().enumerate().map(place).collect();
    let interest = Interest::new(places, columns, repeats, 0.0);
    cache.add_interest(&interest);
    interest
}

fn claimed(cache: &Arc<Cache>, chunk: Chunk) -> Claim {
    let found = cache.find(vec![chunk], |_| Waiter::new(|_| ()));
    match found.into_iter().next() {
        Some((_, Found::Claimed(claim))) => claim,
        _ => panic!("it is there already"),
    }
}

fn decode(cache: &Arc<Cache>, row_group: usize, name: &str) {
    claimed(cache, chunk(row_group, name)).fulfil(&column(row_group as i64), Duration::from_millis(1));
}

/// Returns the row groups whose column `name` is in memory.
fn in_memory(cache: &Cache, name: &str) -> Vec<usize> {
    let state = locked(&cache.state);
    let is_there = |row_group: &usize| {
        let kept = state.items.get(&Key::Decoded(chunk(*row_group, name)));
        kept.is_some_and(|kept| kept.memory.is_some())
    };
    (0..10).filter(is_there).collect()
}

#[test]
fn columns_without_future_reads_are_not_kept() {
    let cache = Cache::new(100 * KILOBYTE, None).unwrap();
    decode(&cache, 0, "a");
    let interest = interest(&cache, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "a", true);
    interest.reached(0.35);
    (0..10).for_each(|row_group| decode(&cache, row_group, "a"));
    decode(&cache, 9, "b");
    // Row groups 0 to 3 are behind the job, and the next epoch needs their batches instead.
    assert_eq!(in_memory(&cache, "a"), [4, 5, 6, 7, 8, 9]);
    assert!(in_memory(&cache, "b").is_empty());
}

#[test]
fn row_groups_that_a_job_is_reading_are_kept() {
    let cache = Cache::new(100 * KILOBYTE, None).unwrap();
    let places = (0..10).map(|i| (("file".into(), i), i as f32 / 10.0)).collect();
    let interest = Interest::new(places, HashSet::from(["a".to_owned()]), true, 0.15);
    cache.add_interest(&interest);
    interest.reached_row_group(&"file".into(), 5);
    (0..6).for_each(|row_group| decode(&cache, row_group, "a"));
    assert_eq!(in_memory(&cache, "a"), [4, 5]);
}

#[test]
fn items_with_the_fewest_and_latest_reads_are_evicted_first() {
    let cache = Cache::new(4 * KILOBYTE + 512, None).unwrap();
    let one = interest(&cache, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "a", false);
    one.reached(0.95);
    (0..4).for_each(|row_group| decode(&cache, row_group, "a"));
    assert_eq!(in_memory(&cache, "a"), [0, 1, 2, 3]);
    // All columns are needed only in the next epoch, the fifth one after the others.
    decode(&cache, 4, "a");
    assert_eq!(in_memory(&cache, "a"), [0, 1, 2, 3]);
    // A second job reads the fifth column next. Among the others, the fourth is needed last.
    let two = interest(&cache, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "a", false);
    two.reached(0.35);
    decode(&cache, 4, "a");
    assert_eq!(in_memory(&cache, "a"), [0, 1, 2, 4]);
    drop((one, two));
    cache.leave(4 * KILOBYTE);
    assert_eq!(in_memory(&cache, "a").len(), 0);
    assert_eq!(cache.figures().cached_bytes, 0);
}

#[test]
fn the_value_of_a_form_is_the_time_that_it_saves() {
    let cache = Cache::new(3 * KILOBYTE, None).unwrap();
    let interest = interest(&cache, &[0, 1, 2], "a", true);
    interest.reached(-1.0);
    decode(&cache, 1, "a");
    decode(&cache, 2, "a");
    let block = Block { job: "job".to_owned(), epoch: 0, steps: 0..4 };
    let parts = || vec![Bytes::from(vec![1; 2000])];
    cache.put_block(block.clone(), parts(), (&interest, 0.0), Some(Duration::from_nanos(1)));
    assert!(cache.take_block(&block).is_none(), "it is made faster than columns are decoded");
    cache.put_block(block.clone(), parts(), (&interest, 0.0), Some(Duration::from_secs(1)));
    assert_eq!((cache.take_block(&block), in_memory(&cache, "a").len()), (Some(parts()), 0));
    assert!(cache.take_block(&block).is_none(), "it was taken");
}

#[test]
fn eviction_among_many_items_compares_a_part_and_keeps_the_limit() {
    let items = 3 * COMPARED;
    let limit = 2 * COMPARED as u64 * 100;
    let cache = Cache::new(limit, None).unwrap();
    let interest = interest(&cache, &[], "a", true);
    for item in 0..items {
        let block = Block { job: "job".to_owned(), epoch: 0, steps: item as u64..item as u64 + 1 };
        let parts = vec![Bytes::from(vec![1; 100])];
        cache.put_block(
            block,
            parts,
            (&interest, item as f32 / items as f32),
            Some(Duration::from_millis(1)),
        );
        assert!(cache.figures().cached_bytes <= limit, "item {item}");
    }
    let mut state = locked(&cache.state);
    let parts = state.items.len().div_ceil(COMPARED);
    assert!(parts > 1, "{}", state.items.len());
    let mut seen = HashSet::new();
    for _ in 0..parts {
        let part = state.by_worth(|_| true);
        assert!(part.len() <= COMPARED);
        seen.extend(part.into_iter().map(|(_, key)| key));
    }
    assert_eq!(seen.len(), state.items.len(), "all have their turn");
    drop(state);
    cache.leave(limit);
    assert_eq!(cache.figures().cached_bytes, 0);
}

#[test]
fn a_block_that_was_cached_says_nothing_about_its_cost() {
    let cache = Cache::new(100 * KILOBYTE, None).unwrap();
    let interest = interest(&cache, &[0], "a", true);
    let block = Block { job: "job".to_owned(), epoch: 0, steps: 0..4 };
    let parts = vec![Bytes::from(vec![1; 2000])];
    cache.put_block(block.clone(), parts, (&interest, 0.0), Some(Duration::from_secs(1)));
    let cost = || locked(&cache.state).rates[Key::Batches(block.clone()).form()].get();
    let before = cost();
    for epoch in 1..4 {
        let parts = cache.take_block(&block).unwrap();
        let share = epoch as f32 / 4.0;
        cache.put_block(block.clone(), parts, (&interest, share), None);
        assert_eq!(cost(), before, "epoch {epoch}");
        let share_of = |stored: &Stored| stored.owner.as_ref().map(|(_, share)| *share);
        assert_eq!(
            locked(&cache.state).items.get(&Key::Batches(block.clone())).and_then(share_of),
            Some(share)
        );
    }
}

#[test]
fn a_column_is_decoded_once_and_others_wait_for_it() {
    let cache = Cache::new(100 * KILOBYTE, None).unwrap();
    let (sender, told) = mpsc::channel();
    let waiter = |chunk: &Chunk| {
        let (sender, name) = (sender.clone(), chunk.column.clone());
        Waiter::new(move |column| sender.send((name, column)).unwrap())
    };
    let chunks = || vec![chunk(0, "a"), chunk(0, "b")];
    let first = cache.find(chunks(), waiter);
    assert!(first.iter().all(|(_, found)| matches!(found, Found::Claimed(_))));
    let second = cache.find([chunks(), vec![chunk(0, "c")]].concat(), waiter);
    assert!(matches!(second[..], [(_, Found::Coming), (_, Found::Coming), (_, Found::Claimed(_))]));
    let mut claims = first.into_iter().filter_map(|(_, found)| match found {
        Found::Claimed(claim) => Some(claim),
        _ => None,
    });
    claims.next().unwrap().fulfil(&column(7), Duration::ZERO);
    assert_eq!(told.try_recv().unwrap(), ("a".into(), Some(column(7))));
    assert!(told.try_recv().is_err());
    // A dropped claim is reported, so that others decode the column themselves.
    drop(claims);
    assert_eq!(told.try_recv().unwrap(), ("b".into(), None));
    let again = cache.find(vec![chunk(0, "b")], waiter);
    assert!(matches!(again[..], [(_, Found::Claimed(_))]));
}

#[test]
fn evicted_items_are_read_from_disk_within_its_limit() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::new(2 * KILOBYTE + 512, Some((directory.path(), 3 * KILOBYTE + 512))).unwrap();
    let interest = interest(&cache, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "a", false);
    interest.reached(0.95);
    for row_group in (0..10).rev() {
        decode(&cache, row_group, "a");
        // Waits until the disk has written the item.
        let started = Instant::now();
        while !cache.disk.as_ref().unwrap().is_idle() {
            assert!(started.elapsed() < Duration::from_secs(120), "the disk does not keep up");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(in_memory(&cache, "a"), [0, 1]);
    let found = |row_group: usize| {
        let found = cache.find(vec![chunk(row_group, "a")], |_| Waiter::new(|_| ()));
        matches!(found[..], [(_, Found::OnDisk)]).then(|| cache.column(&chunk(row_group, "a")).unwrap())
    };
    let on_disk: Vec<_> = (2..10).filter_map(|row_group| Some((row_group, found(row_group)?))).collect();
    assert_eq!(on_disk.iter().map(|(row_group, _)| *row_group).collect::<Vec<_>>(), [2, 3, 4]);
    assert!(on_disk.iter().all(|(row_group, found)| *found == column(*row_group as i64)));
    let figures = cache.figures();
    assert!(figures.cached_bytes_on_disk <= 3 * KILOBYTE + 512 && figures.disk_hits == 3, "{figures:?}");
    cache.leave(u64::MAX);
    assert_eq!(cache.figures().cached_bytes, 0);
    // A damaged file counts as missing.
    let files: Vec<_> = fs_err::read_dir(directory.path().join("cache-0")).unwrap().collect();
    for file in files {
        fs_err::write(file.unwrap().path(), "something else").unwrap();
    }
    assert!(cache.column(&chunk(3, "a")).is_none());
    assert!(matches!(cache.find(vec![chunk(3, "a")], |_| Waiter::new(|_| ()))[..], [(_, Found::Claimed(_))]));
}
