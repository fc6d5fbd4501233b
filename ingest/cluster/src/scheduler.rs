//! The scheduler: receives plans, divides them into stages, and gives the tasks of the stages to executors.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Context;
use ballista_core::serde::protobuf::scheduler_grpc_server::SchedulerGrpcServer;
use ballista_executor::terminate::sig_term;
use ballista_scheduler::api::get_routes;
use ballista_scheduler::cluster::BallistaCluster;
use ballista_scheduler::config::SchedulerConfig;
use ballista_scheduler::scheduler_process::{create_scheduler, start_grpc_service_with_listener};
use ballista_scheduler::scheduler_server::SchedulerServer;
use datafusion::execution::{SessionState, SessionStateBuilder};
use datafusion::prelude::SessionConfig;
use datafusion_proto::protobuf::{LogicalPlanNode, PhysicalPlanNode};
use onefold_base::address::Listening;
use onefold_ingest::executor::functions;
use onefold_ingest::remote::Stores;
use onefold_terminal::Printer;
use tokio::net::TcpListener;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::MESSAGE_BYTES;
use crate::codec::PlanCodec;
use crate::executor::{POLICY, config_producer};
use crate::tls::{Tls, TlsArguments};

/// The interval at which the scheduler looks for lost executors, in seconds.
const LOOK_SECONDS: u64 = 2;

/// The arguments of `scheduler`.
#[derive(Debug, clap::Args)]
pub(crate) struct SchedulerArguments {
    /// Address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    bind: IpAddr,
    /// Port for clients, executors, the REST API and Prometheus (`/api/metrics`); any free one if 0
    #[arg(long, default_value_t = 50050)]
    port: u16,
    /// Name or address by which executors reach this process [default: that of `--bind`]
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Seconds without a heartbeat after which an executor is lost, and its tasks go to others; an executor with long
    /// tasks sends one every 5 seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(8..))]
    executor_timeout: u64,
    #[command(flatten)]
    tls: TlsArguments,
}

type OurScheduler = SchedulerServer<LogicalPlanNode, PhysicalPlanNode>;

/// Runs the scheduler until it receives a signal to end.
pub(crate) async fn run(arguments: &SchedulerArguments, printer: &Printer) -> anyhow::Result<()> {
    let tls = arguments.tls.load()?;
    let listener = TcpListener::bind((arguments.bind, arguments.port))
        .await
        .with_context(|| format!("port {} of {} cannot be listened on", arguments.port, arguments.bind))?;
    let address = listener.local_addr()?;
    let host = arguments.host.clone().unwrap_or_else(|| arguments.bind.to_string());
    let config = Arc::new(SchedulerConfig {
        external_host: host.clone(),
        bind_host: arguments.bind.to_string(),
        bind_port: address.port(),
        scheduling_policy: POLICY,
        finished_job_data_clean_up_interval_seconds: 60,
        grpc_server_max_decoding_message_size: MESSAGE_BYTES,
        grpc_server_max_encoding_message_size: MESSAGE_BYTES,
        grpc_client_max_message_size: MESSAGE_BYTES,
        executor_timeout_seconds: arguments.executor_timeout,
        expire_dead_executor_interval_seconds: LOOK_SECONDS,
        no_executors_grace_period_seconds: arguments.executor_timeout,
        override_config_producer: Some(config_producer(tls.as_ref())),
        override_session_builder: Some(Arc::new(session)),
        override_physical_codec: Some(PlanCodec::new("scheduler", None)),
        override_create_grpc_client_endpoint: tls.as_ref().map(Tls::endpoints),
        use_tls: tls.is_some(),
        ..SchedulerConfig::default()
    });
    config.validate()?;
    let cluster = BallistaCluster::new_from_config(&config).await?;
    let scheduler: OurScheduler = create_scheduler(cluster, Arc::clone(&config)).await?;
    let (scheme, port) = (if tls.is_some() { "https" } else { "http" }, address.port());
    let text = format!("scheduler at {host}:{port}, REST API and metrics at {scheme}://{host}:{port}/api");
    printer.summary(&text, &Listening { address: format!("{host}:{port}") })?;
    tokio::select! {
        served = serve(listener, scheduler, tls) => served,
        ended = sig_term() => Ok(ended?),
        ended = tokio::signal::ctrl_c() => Ok(ended?),
    }
}

/// Serves clients and executors.
async fn serve(listener: TcpListener, scheduler: OurScheduler, tls: Option<Tls>) -> anyhow::Result<()> {
    let Some(tls) = tls else {
        return Ok(start_grpc_service_with_listener(listener, scheduler).await?);
    };
    let grpc = SchedulerGrpcServer::new(scheduler.clone())
        .max_encoding_message_size(MESSAGE_BYTES as usize)
        .max_decoding_message_size(MESSAGE_BYTES as usize);
    let routes = get_routes(Arc::new(scheduler)).merge(Routes::new(grpc).prepare().into_axum_router());
    let mut server = Server::builder().accept_http1(true).tls_config(tls.server())?;
    Ok(server.add_routes(Routes::from(routes)).serve_with_incoming(TcpIncoming::from(listener)).await?)
}

/// Makes a session of the scheduler. It decodes plans that call the SQL functions of `onefold-ingest`.
fn session(config: SessionConfig) -> datafusion::error::Result<SessionState> {
    let runtime = datafusion::execution::runtime_env::RuntimeEnvBuilder::new()
        .with_object_store_registry(Arc::new(Stores::default()))
        .build_arc()?;
    let mut state = SessionStateBuilder::new()
        .with_default_features()
        .with_config(config)
        .with_runtime_env(runtime)
        .build();
    for function in functions()? {
        datafusion::execution::FunctionRegistry::register_udf(&mut state, function)?;
    }
    Ok(state)
}
