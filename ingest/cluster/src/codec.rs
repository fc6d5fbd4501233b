//! The encoding of plans between processes: Ballista's codec for its own operators, and an extension for the operators
//! of `onefold-ingest`.
//!
//! An operator of `onefold-ingest` is encoded as three parts with a line end after each of the first two: `ofld` and the
//! version of the sender, the operator's text, which is one line of JSON, and the plan of the part that DataFusion can
//! encode (empty if the operator has no such part).

use std::sync::Arc;

use ballista_core::serde::BallistaPhysicalExtensionCodec;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::logical_expr::ScalarUDF;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{
    AsExecutionPlan, PhysicalExtensionCodec, PhysicalProtoConverterExtension,
};
use datafusion_proto::protobuf::PhysicalPlanNode;
use onefold_ingest::executor::{
    ExecutorMemory, Sent, read_function, read_operator, write_function, write_operator,
};

const MAGIC: &[u8] = b"ofld";
/// The version of this program. Another version may give the same text another meaning.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Encodes and decodes plans.
#[derive(Debug)]
pub(crate) struct PlanCodec {
    ballista: BallistaPhysicalExtensionCodec,
    /// The role of this process, for messages: `client`, `scheduler` or `executor`.
    role: &'static str,
    /// The memory that this process gives to the operators that it executes; `None` if it executes none.
    memory: Option<ExecutorMemory>,
}

impl PlanCodec {
    pub(crate) fn new(role: &'static str, memory: Option<ExecutorMemory>) -> Arc<Self> {
        Arc::new(Self { ballista: BallistaPhysicalExtensionCodec::default(), role, memory })
    }

    /// Decodes an operator of `onefold-ingest`, or returns `None` if the bytes are not one.
    fn read(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
    ) -> Option<Result<Arc<dyn ExecutionPlan>>> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let read = || -> Result<Arc<dyn ExecutionPlan>> {
            let cut = || DataFusionError::Internal("an operator was cut short".to_owned());
            let (version, rest) = line(rest).ok_or_else(cut)?;
            if version != VERSION.as_bytes() {
                return Err(DataFusionError::Execution(format!(
                    "the plan was made by onefold-cluster {}, but this {} is {VERSION}: run the same version everywhere",
                    String::from_utf8_lossy(version),
                    self.role,
                )));
            }
            let (text, plan) = line(rest).ok_or_else(cut)?;
            let plan = match plan {
                [] => None,
                plan => Some(
                    <PhysicalPlanNode as AsExecutionPlan>::try_decode(plan)?
                        .try_into_physical_plan(context, self)?,
                ),
            };
            read_operator(Sent { text: text.to_vec(), plan }, inputs, self.memory.as_ref())
        };
        Some(read())
    }
}

/// Returns the first line of `bytes`, and the bytes after it.
fn line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

impl PhysicalExtensionCodec for PlanCodec {
    fn try_decode(
        &self,
        bytes: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        self.read(bytes, inputs, context)
            .unwrap_or_else(|| self.ballista.try_decode(bytes, inputs, context, converter))
    }

    fn try_encode(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        bytes: &mut Vec<u8>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        let Some(Sent { text, plan }) = write_operator(&plan)? else {
            return self.ballista.try_encode(plan, bytes, converter);
        };
        bytes.extend([MAGIC, VERSION.as_bytes(), b"\n", &text, b"\n"].concat());
        if let Some(plan) = plan {
            PhysicalPlanNode::try_from_physical_plan(plan, self)?.try_encode(bytes)?;
        }
        Ok(())
    }

    fn try_encode_udf(&self, function: &ScalarUDF, bytes: &mut Vec<u8>) -> Result<()> {
        bytes.extend(write_function(function)?.unwrap_or_default());
        Ok(())
    }

    fn try_decode_udf(&self, name: &str, bytes: &[u8]) -> Result<Arc<ScalarUDF>> {
        match bytes {
            [] => datafusion::common::plan_err!("this {} has no function `{name}`", self.role),
            sent => read_function(sent),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the encoding of an operator with this text by a sender of this version.
    fn sent(version: &str, text: &str) -> Vec<u8> {
        [MAGIC, version.as_bytes(), b"\n", text.as_bytes(), b"\n"].concat()
    }

    fn error(bytes: &[u8]) -> String {
        let codec = PlanCodec::new("executor", None);
        let read = codec.read(bytes, &[], &TaskContext::default()).expect("one of our operators");
        read.unwrap_err().to_string()
    }

    #[test]
    fn plans_of_another_version_are_refused() {
        let error = error(&sent("0.0.9", "{}"));
        assert!(
            error.contains("onefold-cluster 0.0.9, but this executor is") && error.contains(VERSION),
            "{error}"
        );
    }

    #[test]
    fn damaged_operators_are_errors() {
        let whole = sent(VERSION, "\"Received\"");
        assert!(error(&whole).contains("without an input"));
        for length in MAGIC.len()..whole.len() {
            assert!(error(&whole[..length]).contains("cut short"), "{length}");
        }
        assert!(error(&sent(VERSION, "nonsense")).contains("cannot be sent"));
        assert!(PlanCodec::new("client", None).read(b"other", &[], &TaskContext::default()).is_none());
    }
}
