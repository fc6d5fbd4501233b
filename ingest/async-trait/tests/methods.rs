//! Traits whose methods the macro desugars, called as users of trait objects do.

use async_trait::async_trait;
use std::cell::Cell;
use std::fmt::Debug;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};

/// Polls a future that never waits.
fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("the future waits"),
    }
}

fn send<T: Send>(value: T) -> T {
    value
}

#[async_trait]
trait Store: Debug + Send + Sync {
    async fn get(&self, key: &str, prefix: Option<&str>) -> Result<String, String>;

    async fn put(&mut self, key: (String, u8), value: Vec<u8>) -> usize;

    async fn close(self: Box<Self>) -> &'static str;

    async fn share(self: Arc<Self>) -> usize {
        Arc::strong_count(&self)
    }

    async fn both(&self, keys: &[&str]) -> Result<Vec<String>, String> {
        let mut values = Vec::new();
        for key in keys {
            values.push(self.get(key, None).await?);
        }
        Ok(values)
    }

    async fn name(&self, other: &str) -> &str;

    async fn fill(&self, buffer: &mut Vec<&str>) {
        buffer.push("filled");
    }

    async fn describe(&self) -> Box<dyn Debug + Send> {
        if self.get("absent", None).await.is_err() {
            return Box::new("nothing is there");
        }
        Box::new(1)
    }
}

#[derive(Debug)]
struct Map<'a, T> {
    value: &'a str,
    put: Vec<T>,
}

#[async_trait]
impl<'a, T: From<u8> + Debug + Send + Sync> Store for Map<'a, T> {
    async fn get(&self, key: &str, prefix: Option<&str>) -> Result<String, String> {
        match key {
            "absent" => Err(format!("{key} is not there")),
            _ => Ok(format!("{}{key}={}", prefix.unwrap_or_default(), self.value)),
        }
    }

    async fn put(&mut self, (key, _): (String, u8), mut value: Vec<u8>) -> usize {
        value.push(0);
        self.put.extend(value.into_iter().map(T::from));
        key.len() + self.put.len()
    }

    async fn close(self: Box<Self>) -> &'static str {
        "closed"
    }

    async fn name(&self, _other: &str) -> &str {
        self.value
    }
}

fn map(value: &str) -> Map<'_, u16> {
    Map { value, put: Vec::new() }
}

#[test]
fn trait_objects_have_async_methods() {
    let text = String::from("v");
    let mut store: Box<dyn Store + '_> = Box::new(map(&text));
    assert_eq!(ready(send(store.get("k", Some("p:")))), Ok("p:k=v".to_owned()));
    assert_eq!(ready(store.both(&["a", "b"])), Ok(vec!["a=v".to_owned(), "b=v".to_owned()]));
    assert_eq!(ready(store.both(&["a", "absent"])), Err("absent is not there".to_owned()));
    assert_eq!(ready(store.put(("key".to_owned(), 0), vec![1, 2])), 6);
    assert_eq!(format!("{:?}", ready(store.describe())), "\"nothing is there\"");
    assert_eq!(ready(store.close()), "closed");
    let shared = Arc::new(map("v"));
    assert_eq!(ready(send(shared.clone().share())), 2);
}

/// The return type's elided lifetime is that of `self`, not that of a shorter argument.
#[test]
fn a_result_outlives_the_other_arguments() {
    let store = map("v");
    let name = {
        let other = String::from("short");
        ready(store.name(&other))
    };
    assert_eq!(name, "v");
}

/// A lifetime behind `&mut` is not that of the borrow: the buffer is free again after the call.
#[test]
fn a_mutable_argument_is_borrowed_for_the_call() {
    let (store, mut buffer) = (map("v"), vec!["before"]);
    ready(store.fill(&mut buffer));
    ready(store.fill(&mut buffer));
    assert_eq!(buffer, ["before", "filled", "filled"]);
}

#[async_trait(?Send)]
trait Local {
    async fn add<T: Into<usize>>(&self, value: T, more: impl Fn(&str) -> usize) -> usize;
}

#[async_trait(?Send)]
impl Local for Cell<usize> {
    async fn add<T: Into<usize>>(&self, value: T, more: impl Fn(&str) -> usize) -> usize {
        self.set(self.get() + value.into() + more("four"));
        self.get()
    }
}

#[test]
fn futures_that_are_not_send() {
    let sum = Cell::new(1);
    assert_eq!(ready(sum.add(2_u16, |text| text.len())), 7);
    assert_eq!(ready(sum.add(2_usize, str::len)), 13);
}

struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
    }
}

#[async_trait]
trait Consumer {
    async fn consume(self, _: Counted, _named: Counted);
}

#[async_trait]
impl Consumer for Counted {
    async fn consume(self, _: Counted, _named: Counted) {}
}

/// As with an async function, arguments live as long as the future, also those that the body does not name.
#[test]
fn a_future_owns_its_arguments() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let counted = || Counted(dropped.clone());
    let mut future: Pin<Box<dyn Future<Output = ()> + Send>> = counted().consume(counted(), counted());
    assert_eq!(dropped.load(Relaxed), 0);
    ready(future.as_mut());
    assert_eq!(dropped.load(Relaxed), 3);
}
