//! The server of a process, which is a master or a worker.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use onefold_base::fault::{Explain, option, text};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::flight::{self, Answers};
use crate::security::{Proof, SecurityArguments};

/// The time after which a process that waits for an answer reports it.
const SILENT: Duration = Duration::from_secs(4);

/// Listens on an address.
pub(crate) async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).await.map_err(|error| {
        let hint = text!["choose another port with ", option("listen")];
        error.fault().within(&format!("`{address}` cannot be listened on")).hint(hint)
    });
    Ok(listener?)
}

/// Serves a port: answers questions, and requests for `pages`. If the files with certificates or tokens change, new
/// connections use the new ones. Existing connections end after their current requests.
pub(crate) async fn serve<A: Answers>(
    listener: TcpListener,
    answers: Arc<A>,
    security: &SecurityArguments,
    pages: impl Fn(&Proof) -> Router,
) -> anyhow::Result<()> {
    let listener = listener.into_std()?;
    let mut proof = security.load()?;
    loop {
        let keep_alive = Duration::from_secs(10);
        let mut builder = Server::builder().accept_http1(true).http2_keepalive_interval(Some(keep_alive));
        if let Some(tls) = proof.server_tls() {
            builder = builder.tls_config(tls)?;
        }
        let incoming = TcpIncoming::from(TcpListener::from_std(listener.try_clone()?)?);
        let routes = pages(&proof).merge(flight::routes(Arc::clone(&answers), proof.guard()));
        let (end, ended) = oneshot::channel::<()>();
        let server = builder.add_routes(Routes::from(routes)).serve_with_incoming_shutdown(
            incoming.with_nodelay(Some(true)),
            async move {
                let _ = ended.await;
            },
        );
        let mut server = tokio::spawn(server);
        tokio::select! {
            served = &mut server => return Ok(served??),
            found = security.changed(&proof) => proof = found,
        }
        let _ = end.send(());
    }
}

/// Waits for an answer. Calls `say` once if it takes longer than [`SILENT`], and keeps waiting.
pub(crate) async fn told_if_silent<T>(answer: impl Future<Output = T>, say: impl FnOnce()) -> T {
    let mut answer = std::pin::pin!(answer);
    match tokio::time::timeout(SILENT, answer.as_mut()).await {
        Ok(answer) => answer,
        Err(_) => {
            say();
            answer.await
        }
    }
}

/// Waits for a signal to end.
pub(crate) async fn told_to_end() {
    use tokio::signal::unix::{SignalKind, signal};
    let (terminated, interrupted) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    let (Ok(mut terminated), Ok(mut interrupted)) = (terminated, interrupted) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminated.recv() => {},
        _ = interrupted.recv() => {},
    }
}
