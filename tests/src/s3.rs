//! A real S3 server on the loopback interface that can simulate failures of networks and services ([`S3Server`]).
//!
//! ```no_run
//! use std::time::Duration;
//! use onefold_tests::{Dir, Fault, S3Server, When};
//!
//! let (dir, server) = (Dir::new(), S3Server::start());
//! server.put("data", "logs/a.csv", b"request,user\n1,2\n");
//! server.delay(Duration::from_millis(20));                              // every request takes longer
//! server.inject("GET /data/logs/", Fault::SlowDown, When::Nth(2));      // the second of these requests
//! server.inject("", Fault::Reset, When::Chance { probability: 0.05, seed: 1 });
//! dir.command("onefold-ingest build dataset.toml --out s3://data/ds").with_s3(&server).works();
//! assert!(server.counters().faults > 0);
//! ```

mod answer;
mod backend;

use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::StreamExt;
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_LENGTH;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use onefold_base::sync::locked;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use s3s_fs::FileSystem;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use self::answer::{Answer, Broken, broken, refusal, reset, slow, stalled, truncated};
use self::backend::{Backend, Folder, drain};

/// The access key with which requests are signed.
pub const ACCESS_KEY: &str = "onefold";
/// The secret key.
pub const SECRET_KEY: &str = "a secret";
/// The bucket of every server.
pub const BUCKET: &str = "data";

/// The largest number of simultaneous connections. Further connections wait.
const CONNECTIONS: usize = 256;

/// A fault of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The answer is `503 SlowDown`; the request is not executed.
    SlowDown,
    /// The answer is `500 InternalError`; the request is not executed.
    InternalError,
    /// The answer is `403 AccessDenied`; the request is not executed.
    Denied,
    /// The answer is `400 AuthorizationHeaderMalformed`, as if the bucket was in another region; the request is not
    /// executed.
    OtherRegion,
    /// The answer is `409 ConditionalRequestConflict`, as if another writer was creating the object; the request is
    /// not executed.
    Conflict,
    /// The connection is reset before the request is executed.
    Reset,
    /// The request is executed, and then the connection is reset, so the client does not know the result.
    LoseAnswer,
    /// The connection is reset after half of the answer's body.
    Truncate,
    /// The connection remains open without an answer; the request is not executed.
    Stall,
    /// The connection remains open, but the answer's body stops after its first half.
    StallHalfway,
    /// The answer's body is sent at this rate.
    Slow {
        /// Bytes per second, at least 1.
        bytes_per_second: u64,
    },
}

/// The selection of the requests that get a fault, among those to which a rule applies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum When {
    /// All requests.
    Always,
    /// The n-th request, counted from 1.
    Nth(u64),
    /// The first n requests.
    First(u64),
    /// Each request with this probability. Equal seeds give equal choices.
    Chance {
        /// The probability, from 0 to 1.
        probability: f64,
        /// The seed of the generator, ChaCha8.
        seed: u64,
    },
}

/// The numbers of requests that a server has received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// All requests, including those with faults.
    pub requests: u64,
    /// `GET` requests for objects.
    pub gets: u64,
    /// `GET` requests for listings.
    pub lists: u64,
    /// `HEAD` requests.
    pub heads: u64,
    /// `PUT` requests: objects and parts of objects.
    pub puts: u64,
    /// `POST` requests: starts and ends of multipart uploads, and deletions of several objects.
    pub posts: u64,
    /// `DELETE` requests.
    pub deletes: u64,
    /// Requests with a fault.
    pub faults: u64,
    /// Bytes of the answers' bodies.
    pub bytes_sent: u64,
    /// Bytes of the requests' bodies, according to their headers.
    pub bytes_received: u64,
}

/// An S3 server with the bucket [`BUCKET`], which runs until it is dropped. Its objects are files in a temporary
/// directory, or the objects of [another server](Self::in_front_of).
///
/// Signatures are checked. In addition to the functions of `s3s-fs`, `GET` and `HEAD` respect `If-Match`, and write
/// requests with `If-Match` or `If-None-Match` are executed one after the other, so that only one of two creations
/// succeeds.
#[derive(Debug)]
pub struct S3Server {
    shared: Arc<Shared>,
    /// The directory of the objects; `None` if requests are forwarded to another server.
    folder: Option<tempfile::TempDir>,
    address: SocketAddr,
    /// The runtime; `None` only during the drop.
    runtime: Option<tokio::runtime::Runtime>,
}

impl Default for S3Server {
    fn default() -> Self {
        Self::start()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl S3Server {
    /// Starts a server on a free port of 127.0.0.1.
    pub fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("onefold-s3-").tempdir().expect("a temporary folder");
        fs_err::create_dir_all(folder.path().join(BUCKET)).expect("a folder");
        let mut builder = S3ServiceBuilder::new(FileSystem::new(folder.path()).expect("a file system"));
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let backend = Backend::Folder(Box::new(Folder {
            service: builder.build(),
            path: folder.path().to_owned(),
            conditional_writes: tokio::sync::Mutex::default(),
        }));
        Self::serving(backend, Some(folder))
    }

    /// Starts a server that forwards requests to the server at `address` and returns its answers, with the faults,
    /// delays, actions and counters of this server. The other server stores the objects, and may check signatures.
    pub fn in_front_of(address: SocketAddr) -> Self {
        Self::serving(Backend::Other(address), None)
    }

    fn serving(backend: Backend, folder: Option<tempfile::TempDir>) -> Self {
        let shared = Arc::new(Shared { backend, state: Mutex::default() });
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("an address");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        runtime.spawn(serve(listener, Arc::clone(&shared)));
        Self { shared, folder, address, runtime: Some(runtime) }
    }

    /// Returns the endpoint, `http://127.0.0.1:…`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the environment variables with which a program accesses this server.
    pub fn environment(&self) -> [(&'static str, String); 7] {
        [
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET_KEY.to_owned()),
            ("AWS_ENDPOINT_URL", self.url()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("NO_PROXY", "127.0.0.1".to_owned()),
            ("no_proxy", "127.0.0.1".to_owned()),
        ]
    }

    /// Returns the path of the file of an object. Uploaded objects can be read from it. To change an object, use
    /// [`put`](Self::put), which also changes its ETag.
    #[track_caller]
    pub fn file(&self, bucket: &str, key: &str) -> PathBuf {
        self.folder().join(bucket).join(key)
    }

    #[track_caller]
    fn folder(&self) -> &Path {
        self.folder.as_ref().expect("the objects are those of another server").path()
    }

    /// Creates or replaces an object without a request. Also creates the bucket.
    #[track_caller]
    pub fn put(&self, bucket: &str, key: &str, bytes: impl AsRef<[u8]>) {
        self.writer().put(bucket, key, bytes);
    }

    /// Returns a writer of objects that needs no requests. It can be moved into a closure for
    /// [`before`](Self::before).
    #[track_caller]
    pub fn writer(&self) -> ObjectWriter {
        ObjectWriter { folder: self.folder().to_owned() }
    }

    /// Adds a fault to requests whose first line (`GET /bucket/key?query`) contains `part`, or to all requests if
    /// `part` is empty. If several rules apply to a request, the first one is used.
    pub fn inject(&self, part: &str, fault: Fault, when: When) {
        let seed = if let When::Chance { seed, .. } = when { seed } else { 0 };
        let random = ChaCha8Rng::seed_from_u64(seed);
        self.shared.state().rules.push(Rule { part: part.to_owned(), fault, when, seen: 0, random });
    }

    /// Delays the execution of every request by `latency`.
    pub fn delay(&self, latency: Duration) {
        self.shared.state().latency = latency;
    }

    /// Calls `action` before the n-th request, counted from 1 and from now on, whose first line contains `part`.
    pub fn before(&self, part: &str, nth: u64, action: impl FnOnce() + Send + 'static) {
        let action = Some(Box::new(action) as Box<dyn FnOnce() + Send>);
        self.shared.state().actions.push(Action { part: part.to_owned(), nth, seen: 0, action });
    }

    /// Removes all faults, delays and actions.
    pub fn heal(&self) {
        let mut state = self.shared.state();
        state.rules.clear();
        state.actions.clear();
        state.latency = Duration::ZERO;
    }

    /// Returns the counters since the start or the last [`reset_counters`](Self::reset_counters).
    pub fn counters(&self) -> Counters {
        self.shared.state().counters
    }

    /// Resets the counters to 0.
    pub fn reset_counters(&self) {
        self.shared.state().counters = Counters::default();
    }
}

/// A writer of a server's objects as files.
#[derive(Debug, Clone)]
pub struct ObjectWriter {
    folder: PathBuf,
}

impl ObjectWriter {
    /// Creates or replaces an object. Readers that have opened the object continue to read the old one, as with S3.
    #[track_caller]
    pub fn put(&self, bucket: &str, key: &str, bytes: impl AsRef<[u8]>) {
        let path = self.folder.join(bucket).join(key);
        let parent = path.parent().expect("a folder");
        fs_err::create_dir_all(parent).expect("a folder");
        let new = tempfile::NamedTempFile::new_in(&self.folder).expect("a temporary file");
        fs_err::write(new.path(), bytes).expect("a file");
        new.persist(&path).expect("a file");
        // In this file, s3s-fs stores the ETag of an uploaded object. Without it, the ETag is the MD5 of the bytes.
        let kept = format!(".bucket-{}.object-{}.internal.json", base64_url(bucket), base64_url(key));
        let _ = fs_err::remove_file(self.folder.join(kept));
    }
}

/// Encodes text as Base64 with the URL alphabet, without padding (RFC 4648, section 5).
fn base64_url(text: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let encode = |group: &[u8]| {
        let bits = (0..3).fold(0, |bits, at| bits << 8 | usize::from(*group.get(at).unwrap_or(&0)));
        (0..=group.len()).map(|at| char::from(ALPHABET[bits >> (18 - 6 * at) & 63])).collect::<String>()
    };
    text.as_bytes().chunks(3).map(encode).collect()
}

struct Shared {
    backend: Backend,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    latency: Duration,
    rules: Vec<Rule>,
    actions: Vec<Action>,
    counters: Counters,
}

struct Rule {
    part: String,
    fault: Fault,
    when: When,
    /// The number of requests to which the rule applied.
    seen: u64,
    random: ChaCha8Rng,
}

struct Action {
    part: String,
    nth: u64,
    seen: u64,
    action: Option<Box<dyn FnOnce() + Send>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Shared").field("counters", &self.state().counters).finish_non_exhaustive()
    }
}

impl Rule {
    /// Returns whether a request gets the fault of this rule.
    fn applies(&mut self, line: &str) -> bool {
        if !line.contains(&self.part) {
            return false;
        }
        self.seen += 1;
        match self.when {
            When::Always => true,
            When::Nth(nth) => self.seen == nth,
            When::First(count) => self.seen <= count,
            When::Chance { probability, .. } => self.random.random_bool(probability),
        }
    }
}

impl State {
    /// Counts a request, and returns its fault.
    fn begin(&mut self, request: &Request<Incoming>, line: &str) -> Option<Fault> {
        let counters = &mut self.counters;
        counters.requests += 1;
        let is_list = request.uri().query().is_some_and(|query| query.contains("list-type="));
        match *request.method() {
            Method::GET if is_list => counters.lists += 1,
            Method::GET => counters.gets += 1,
            Method::HEAD => counters.heads += 1,
            Method::PUT => counters.puts += 1,
            Method::POST => counters.posts += 1,
            Method::DELETE => counters.deletes += 1,
            _ => {}
        }
        let length = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        counters.bytes_received += length.and_then(|length| length.parse::<u64>().ok()).unwrap_or(0);
        // Every rule counts its requests, including those to which an earlier rule was applied.
        let applies: Vec<bool> = self.rules.iter_mut().map(|rule| rule.applies(line)).collect();
        let fault = applies.iter().position(|applies| *applies).map(|rule| self.rules[rule].fault);
        self.counters.faults += u64::from(fault.is_some());
        fault
    }

    /// Returns the actions that run before a request.
    fn actions(&mut self, line: &str) -> Vec<Box<dyn FnOnce() + Send>> {
        let applying = self.actions.iter_mut().filter(|action| line.contains(&action.part));
        let due = applying.filter_map(|action| {
            action.seen += 1;
            if action.seen == action.nth { action.action.take() } else { None }
        });
        due.collect()
    }
}

/// Accepts connections until the runtime shuts down.
async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    while let Ok((stream, _)) = listener.accept().await {
        let (shared, places) = (Arc::clone(&shared), Arc::clone(&places));
        tokio::spawn(async move {
            let place = places.acquire_owned().await;
            let _ = serve_connection(stream, shared).await;
            drop(place);
        });
    }
}

async fn serve_connection(stream: TcpStream, shared: Arc<Shared>) -> Result<(), Broken> {
    stream.set_nodelay(true).map_err(broken)?;
    // hyper owns the connection. With this second handle, the connection can be ended with a reset.
    let handle = std::net::TcpStream::from(stream.as_fd().try_clone_to_owned().map_err(broken)?);
    let handle = Arc::new(TcpStream::from_std(handle).map_err(broken)?);
    let service = hyper::service::service_fn(move |request| {
        let (shared, handle) = (Arc::clone(&shared), Arc::clone(&handle));
        async move { shared.answer(request, handle).await }
    });
    let connection = hyper::server::conn::http1::Builder::new();
    connection.serve_connection(TokioIo::new(stream), service).await.map_err(broken)
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Answers a request. An error makes hyper close the connection.
    async fn answer(
        self: Arc<Self>,
        request: Request<Incoming>,
        handle: Arc<TcpStream>,
    ) -> Result<Response<Answer>, Broken> {
        let line = format!("{} {}", request.method(), request.uri());
        let (fault, latency) = {
            let mut state = self.state();
            (state.begin(&request, &line), state.latency)
        };
        tokio::time::sleep(latency).await;
        // An action may send requests itself, which other threads of the runtime answer.
        let actions = self.state().actions(&line);
        tokio::task::block_in_place(|| actions.into_iter().for_each(|action| action()));
        let refused = match fault {
            Some(Fault::SlowDown) => Some((StatusCode::SERVICE_UNAVAILABLE, "SlowDown")),
            Some(Fault::InternalError) => Some((StatusCode::INTERNAL_SERVER_ERROR, "InternalError")),
            Some(Fault::Denied) => Some((StatusCode::FORBIDDEN, "AccessDenied")),
            Some(Fault::OtherRegion) => Some((StatusCode::BAD_REQUEST, "AuthorizationHeaderMalformed")),
            Some(Fault::Conflict) => Some((StatusCode::CONFLICT, "ConditionalRequestConflict")),
            _ => None,
        };
        if let Some((status, code)) = refused {
            drain(request).await;
            return Ok(refusal(status, code));
        }
        match fault {
            Some(Fault::Reset) => Err(reset(&handle)),
            Some(Fault::LoseAnswer) => {
                self.execute(request).await?;
                Err(reset(&handle))
            }
            Some(Fault::Truncate) => {
                let (response, half) = self.execute_and_halve(request).await?;
                Ok(response.map(|body| truncated(body, half, handle)))
            }
            Some(Fault::Stall) => {
                drain(request).await;
                // The client gives up and closes the connection, which drops this future.
                std::future::pending().await
            }
            Some(Fault::StallHalfway) => {
                let (response, half) = self.execute_and_halve(request).await?;
                Ok(response.map(|body| stalled(body, half)))
            }
            Some(Fault::Slow { bytes_per_second }) => {
                Ok(self.execute(request).await?.map(|body| slow(body, bytes_per_second.max(1))))
            }
            _ => self.execute(request).await,
        }
    }

    /// Returns the answer of the backend, and half the length of its body.
    async fn execute_and_halve(
        self: &Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<(Response<Answer>, usize), Broken> {
        let response = self.execute(request).await?;
        let length = response.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        let half = length.and_then(|length| length.parse::<usize>().ok()).unwrap_or(0) / 2;
        Ok((response, half))
    }

    /// Returns the answer of the backend, and counts its bytes.
    async fn execute(self: &Arc<Self>, request: Request<Incoming>) -> Result<Response<Answer>, Broken> {
        let shared = Arc::clone(self);
        Ok(self.backend.execute(request).await?.map(|body| {
            let counted = body.0.inspect(move |chunk| {
                let bytes = chunk.as_ref().map_or(0, Bytes::len);
                shared.state().counters.bytes_sent += bytes as u64;
            });
            Answer(counted.boxed())
        }))
    }
}
