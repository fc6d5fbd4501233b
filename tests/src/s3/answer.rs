//! The bodies of the server's answers: complete, truncated, or slow.

use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt, stream};
use hyper::body::{Body, Bytes, Frame};
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderName};
use hyper::{Response, StatusCode};
use tokio::net::TcpStream;

/// The size of a chunk of a slow body, in bytes.
const SLOW_CHUNK: usize = 16 << 10;
/// The size of a chunk of a body that is read from a file, in bytes.
const FILE_CHUNK: u64 = 512 << 10;

/// The reason why a connection ends.
#[derive(Debug)]
pub(super) struct Broken(pub(super) String);

impl fmt::Display for Broken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Broken {}

/// Converts any error into one that ends a connection.
pub(super) fn broken(error: impl fmt::Display) -> Broken {
    Broken(error.to_string())
}

/// Makes the connection end with a reset, and returns the error that ends it.
pub(super) fn reset(handle: &TcpStream) -> Broken {
    match handle.set_zero_linger() {
        Ok(()) => broken("the connection is reset"),
        Err(error) => broken(error),
    }
}

/// Returns an error response of the service.
pub(super) fn refusal(status: StatusCode, code: &str) -> Response<Answer> {
    let text =
        format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>injected</Message></Error>");
    let mut response = Response::new(Answer(stream::iter([Ok(Bytes::from(text))]).boxed()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, "application/xml".parse().expect("a header"));
    response
}

/// Returns the first `bytes` of a body, followed by a reset.
pub(super) fn truncated(body: Answer, bytes: usize, handle: Arc<TcpStream>) -> Answer {
    let end = async move {
        // A reset discards data that is still in transit, so the data gets time to arrive.
        tokio::time::sleep(Duration::from_millis(20)).await;
        Err(reset(&handle))
    };
    Answer(first(body, bytes).chain(stream::once(end)).boxed())
}

/// Returns the first `bytes` of a body, and then sends nothing while the connection remains open.
pub(super) fn stalled(body: Answer, bytes: usize) -> Answer {
    Answer(first(body, bytes).chain(stream::pending()).boxed())
}

/// Returns the first `bytes` of a body.
fn first(body: Answer, bytes: usize) -> impl Stream<Item = Result<Bytes, Broken>> + Send + 'static {
    let mut left = bytes;
    let part = body.0.map(move |chunk| {
        let mut chunk = chunk?;
        chunk.truncate(left);
        left -= chunk.len();
        Ok::<_, Broken>(chunk)
    });
    part.take_while(|chunk| {
        let goes_on = chunk.as_ref().map_or(true, |chunk| !chunk.is_empty());
        async move { goes_on }
    })
}

/// Returns a body that is sent slowly.
pub(super) fn slow(body: Answer, bytes_per_second: u64) -> Answer {
    let pieces = body.0.flat_map(|chunk| {
        let pieces: Vec<Result<Bytes, Broken>> = match chunk {
            Err(error) => vec![Err(error)],
            Ok(chunk) => {
                let starts = (0..chunk.len()).step_by(SLOW_CHUNK);
                starts.map(|start| Ok(chunk.slice(start..chunk.len().min(start + SLOW_CHUNK)))).collect()
            }
        };
        stream::iter(pieces)
    });
    let paced = pieces.then(move |piece| async move {
        let bytes = piece.as_ref().map_or(0, Bytes::len);
        tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64)).await;
        piece
    });
    Answer(paced.boxed())
}

/// Returns the bytes of `file` that belong to an answer with these headers, or `None` if the headers do not specify
/// them. `s3s-fs` reads files in blocks of 4 KiB, which is slower than a reader of a dataset.
pub(super) fn file_body(file: fs_err::File, headers: &HeaderMap) -> Option<Answer> {
    let text = |name: HeaderName| headers.get(name)?.to_str().ok();
    let length: u64 = text(CONTENT_LENGTH)?.parse().ok()?;
    let start = match text(CONTENT_RANGE) {
        Some(range) => range.strip_prefix("bytes ")?.split_once('-')?.0.parse().ok()?,
        None => 0,
    };
    let (file, end) = (Arc::new(file), start + length);
    let chunks = stream::unfold(start, move |start| {
        let file = Arc::clone(&file);
        async move {
            let chunk = end.min(start + FILE_CHUNK) - start;
            if chunk == 0 {
                return None;
            }
            let read = tokio::task::spawn_blocking(move || {
                let mut bytes = vec![0; chunk as usize];
                file.file().read_exact_at(&mut bytes, start).map(|()| Bytes::from(bytes))
            });
            let read = read.await.map_err(broken).and_then(|read| read.map_err(broken));
            Some((read, start + chunk))
        }
    });
    Some(Answer(chunks.boxed()))
}

/// Opens the file of the requested object. Returns `None` if the request is not for an object.
pub(super) fn object_file(folder: &Path, path: &str) -> Option<fs_err::File> {
    let path = percent_decoded(path.trim_start_matches('/'))?;
    let is_inside = Path::new(&path).components().all(|part| matches!(part, Component::Normal(_)));
    let file = folder.join(&path);
    if is_inside && file.is_file() { fs_err::File::open(file).ok() } else { None }
}

/// Decodes the percent encoding of a path (RFC 3986, section 2.1).
fn percent_decoded(path: &str) -> Option<String> {
    let mut parts = path.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        bytes.extend_from_slice(&part.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

/// The body of an answer.
pub(super) struct Answer(pub(super) BoxStream<'static, Result<Bytes, Broken>>);

impl Body for Answer {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        Pin::new(&mut self.0).poll_next(context).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data)))
    }
}
