//! `retail.toml`: events, and the changes of items.

use std::collections::{BTreeMap, BTreeSet};

use super::{Numbers, Random, Sample, add_days, build, check, divide_by_pauses, fails, read};
use crate::logs::Dir;

const EXAMPLE: &str = include_str!("../../../examples/retail.toml");
/// 2024-05-01T00:00:00.123Z in milliseconds since 1970.
const START: i64 = 1_714_521_600_123;
const MINUTE: i64 = 60_000;
const DAY: i64 = 24 * 60 * MINUTE;

/// A row of `events.csv`. The fields are in the order in which they order rows with equal times.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: i64,
    item: i64,
    kind: &'static str,
    visitor: i64,
    order: String,
}

/// The changes of items, as a map from property, item and time to value.
type Changes = BTreeMap<(&'static str, i64, i64), String>;

/// Returns visits on days up to a month apart. All times are multiples of half a minute, so that many events coincide
/// with others, or with the ends of windows.
fn events() -> Vec<Event> {
    let mut random = Random(4);
    let mut all = Vec::new();
    for visitor in 0..40 {
        for _ in 0..2 + random.below(4) {
            let day = [0, 1, 2, 29, 30, 31, 32][random.below(7) as usize];
            let mut at = START + day * DAY + random.below(48) * 30 * MINUTE;
            for _ in 0..1 + random.below(6) {
                let item = match random.percent(5) {
                    true => 5_600_000_000 + random.below(40),
                    false => 5_500_000_000 + random.below(7) * random.below(9),
                };
                let mut add = |at: i64, kind, order: String| {
                    all.push(Event { at, item, kind, visitor: 900 + visitor, order });
                };
                add(at, "view", String::new());
                if random.percent(45) {
                    let cart = at + random.below(80) * MINUTE / 2;
                    add(cart, "addtocart", String::new());
                    if random.percent(60) {
                        let bought = at + random.below(80) * MINUTE / 2;
                        add(bought, "transaction", format!("T-{}", random.below(10_000)));
                    }
                }
                at += (1 + random.below(64)) * MINUTE / 2;
            }
        }
    }
    all
}

/// Returns changes of categories, prices and stock, before the events and between them. Some take place at the time of
/// a view.
fn changes(events: &[Event]) -> Changes {
    let mut random = Random(5);
    let mut all = Changes::new();
    let items: BTreeSet<i64> = events.iter().map(|event| event.item).collect();
    for item in items {
        let views: Vec<i64> = events
            .iter()
            .filter(|event| event.item == item && event.kind == "view")
            .map(|event| event.at)
            .collect();
        for property in ["category", "price", "available", "color"] {
            for _ in 0..random.below(5) {
                let at = match views.is_empty() || random.percent(50) {
                    true => START - DAY + random.below(34 * 24) * 60 * MINUTE,
                    false => views[random.below(views.len() as u64) as usize],
                };
                let value = match property {
                    "category" => format!("c{}", random.below(12)),
                    "price" => (random.below(800) as f64 / 4.0).to_string(),
                    "available" => random.below(2).to_string(),
                    _ => ["red", "dark blue"][random.below(2) as usize].to_owned(),
                };
                all.insert((property, item, at), value);
            }
        }
    }
    all
}

/// Returns the parent of a category. Some categories have no parent, and some are not in the file.
fn parent(category: &str) -> Option<String> {
    let number: i64 = category.strip_prefix('c').unwrap().parse().unwrap();
    (number % 4 != 3 && number % 4 != 2).then(|| format!("department {}", number % 5))
}

/// Writes the logs up to a time. Every seventh event is delivered twice.
fn write_logs(dir: &Dir, events: &[Event], changes: &Changes, until: i64) {
    let mut text = "time_ms,visitor,event,item,order_id\n".to_owned();
    for event in events.iter().chain(events.iter().step_by(7)).filter(|event| event.at < until) {
        let Event { at, item, kind, visitor, order } = event;
        text += &format!("{at},{visitor},{kind},{item},{order}\n");
    }
    dir.write("events.csv", text);
    let mut files = [(); 2].map(|()| "time_ms,item,property,value\n".to_owned());
    for (number, ((property, item, at), value)) in changes.iter().enumerate() {
        if *at < until {
            files[number % 2] += &format!("{at},{item},{property},{value}\n");
        }
    }
    for (number, text) in (1..).zip(files) {
        dir.write(format!("properties-{number}.csv"), text);
    }
    let categories = (0..12).map(|number| format!("c{number}")).filter(|category| !category.ends_with('3'));
    let lines = categories.map(|name| format!("{name},{}\n", parent(&name).unwrap_or_default()));
    dir.write("categories.csv", "category,parent\n".to_owned() + &lines.collect::<String>());
}

/// Returns the samples by definition.
fn samples(events: &[Event], changes: &Changes) -> Vec<Sample> {
    let events: BTreeSet<&Event> = events.iter().collect();
    // Orders with the same visitor, item and time are one purchase, because the order number is not a column of
    // purchases.
    let bought: BTreeSet<(i64, i64, i64)> = events
        .iter()
        .filter(|event| event.kind == "transaction")
        .map(|event| (event.at, event.visitor, event.item))
        .collect();
    let mut samples: BTreeMap<i64, Sample> = BTreeMap::new();
    for view in events.iter().filter(|event| event.kind == "view") {
        let follows = |kind| {
            events.iter().any(|event| {
                (event.visitor, event.item, event.kind) == (view.visitor, view.item, kind)
                    && (view.at..=view.at + 30 * MINUTE).contains(&event.at)
            })
        };
        let now = |property| {
            let all = changes.range((property, view.item, i64::MIN)..=(property, view.item, view.at));
            all.last().map(|(_, value)| value.clone())
        };
        let past: Vec<&&Event> = events
            .iter()
            .filter(|event| event.visitor == view.visitor)
            .filter(|event| event.at < view.at && event.at >= view.at - 30 * DAY)
            .collect();
        let past = &past[past.len().saturating_sub(20)..];
        let buyers: Vec<i64> = bought
            .iter()
            .filter(|(at, _, item)| *item == view.item && *at + 10 * MINUTE < view.at)
            .map(|(_, visitor, _)| *visitor)
            .collect();
        let category: Option<String> = now("category");
        let key: [&dyn std::fmt::Display; 3] = [&view.visitor, &view.item, &view.at];
        let sample = Sample::new(&key, view.visitor.to_string(), view.at * 1000)
            .float("added", follows("addtocart"))
            .float("bought", follows("transaction"))
            .float("price", now("price").map_or(-1.0, |price| price.parse::<f64>().unwrap()))
            .float("available", now("available").map_or(1.0, |value| value.parse::<f64>().unwrap()))
            .ids("hour", [(view.at - START) / (60 * MINUTE) % 24])
            .hashes("visitor", [view.visitor])
            .ids("item", [view.item])
            .ids("department", category.as_deref().and_then(parent))
            .ids("category", category)
            .ids("past_items", past.iter().map(|event| event.item))
            .hashes("past_events", past.iter().map(|event| event.kind))
            .hashes("buyers", &buyers[buyers.len().saturating_sub(5)..]);
        samples.insert(sample.key, sample);
    }
    let mut samples: Vec<Sample> = samples.into_values().collect();
    divide_by_pauses(&mut samples);
    add_days(&mut samples);
    samples
}

#[test]
fn views_become_samples_of_what_was_known() {
    let events = events();
    let changes = changes(&events);
    let dir = Dir::new();
    write_logs(&dir, &events, &changes, i64::MAX);
    build(&dir, EXAMPLE, "retail");
    let mut expected = samples(&events, &changes);

    // The log contains the hard cases: long and short lists, both values of labels, and attributes that have no value
    // yet.
    let share = |of: &dyn Fn(&Sample) -> bool| {
        expected.iter().filter(|sample| of(sample)).count() as f64 / expected.len() as f64
    };
    assert!(expected.len() > 400, "{} samples", expected.len());
    let hard: [&dyn Fn(&Sample) -> bool; 8] = [
        &|sample: &Sample| sample.lists["past_items"].len() == 20,
        &|sample: &Sample| sample.lists["past_items"].is_empty(),
        &|sample: &Sample| sample.lists["buyers"].len() == 5,
        &|sample: &Sample| sample.floats["added"] == 1.0,
        &|sample: &Sample| sample.floats["bought"] == 1.0,
        &|sample: &Sample| sample.floats["price"] == -1.0,
        &|sample: &Sample| sample.lists["category"].is_empty(),
        &|sample: &Sample| sample.lists["department"] != sample.lists["category"],
    ];
    for of in hard {
        assert!((0.02..0.98).contains(&share(of)), "{}", share(of));
    }
    let distinct: BTreeSet<&Event> = events.iter().collect();
    let dataset = dir.path("retail");
    let items = Numbers {
        name: "items",
        logged: &["item"],
        windows: &["past_items"],
        rows: distinct.iter().map(|event| event.item.to_string()).collect(),
        min_count: 3,
    };
    items.check(&dataset, &mut expected);
    for name in ["category", "department"] {
        let numbers = Numbers { name, logged: &[name], windows: &[], rows: vec![], min_count: 1 };
        numbers.check(&dataset, &mut expected);
    }
    check(&dataset, expected);
}

#[test]
fn what_comes_later_changes_nothing_but_labels() {
    let events = events();
    let changes = changes(&events);
    let dir = Dir::new();
    // Without a minimum count all ids keep their texts, whatever is counted later.
    let text = EXAMPLE.replace("min_count = 3", "min_count = 1");
    assert_ne!(text, EXAMPLE);
    let now = START + 30 * DAY + 12 * 60 * MINUTE;
    let seen = |until: i64, out: &str| -> BTreeMap<i64, Sample> {
        write_logs(&dir, &events, &changes, until);
        build(&dir, &text, out);
        let samples = read(&dir.path(out)).into_iter().filter(|sample| sample.time < now * 1000);
        let without_labels = samples.map(|mut sample| {
            sample.floats.retain(|name, _| !["added", "bought"].contains(&&**name));
            (sample.key, sample)
        });
        without_labels.collect()
    };
    let (whole, past) = (seen(i64::MAX, "whole"), seen(now, "past"));
    assert!(past.len() > 200, "{} samples", past.len());
    assert_eq!(whole, past);
    let later = |at: i64| at >= now;
    assert!(events.iter().filter(|event| later(event.at)).count() > 100);
    assert!(changes.keys().filter(|(.., at)| later(*at)).count() > 20);
}

#[test]
fn mistakes_are_explained() {
    let dir = Dir::new();
    let events = events();
    write_logs(&dir, &events, &changes(&events), i64::MAX);
    // Milliseconds that are read as seconds lie in the future.
    let session = "gap = \"30m\"\ntime = { column = \"time_ms\", unit = \"ms\" }";
    let parts = ["`[checks].future`", "`[session].time`", "time = { column = \"time_ms\""];
    fails(&dir, EXAMPLE, session, &session.replace("\"ms\"", "\"s\""), &parts);
    // Numbers in one log never equal texts in another.
    let parts = ["`[join].on`", "`item`", "CAST(item AS VARCHAR)", "schema = { item = \"VARCHAR\" }"];
    let item = "visitor, item, event FROM events";
    fails(&dir, EXAMPLE, item, "visitor, CAST(item AS VARCHAR) AS item, event FROM events", &parts);
    let parts = ["`past_events`", "`event`", "Utf8", "ids = \"hash\""];
    fails(&dir, EXAMPLE, "group = \"past\", ids = \"hash\"", "group = \"past\"", &parts);
}
