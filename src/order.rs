//! What effects are asked to do: values that the plan makes and the effects carry out.
//!
//! Invariant: every order carries its own timeout, so no effect can hold up more than its instance, nor that for ever.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::names::{InstanceName, LaunchId, Port};
use crate::spec::EnvVar;

/// Start this process.
#[derive(Clone, PartialEq)]
pub struct LaunchOrder {
    /// For whom.
    pub instance: InstanceName,
    /// The attempt.
    pub launch_id: LaunchId,
    /// The program and its arguments. A program without `/` is looked up in PATH; [`Program::Own`] is evenkeel itself.
    pub program: Program,
    /// The arguments, without the program.
    pub arguments: Vec<String>,
    /// Variables of the manifest and the engine, the device variables last: later ones win.
    pub environment: Vec<EnvVar>,
    /// The folder to run in; none: the launcher's own choice, a folder of the instance.
    pub working_dir: Option<PathBuf>,
    /// The port that must be free.
    pub port: Option<Port>,
    /// How long preparing may take.
    pub timeout: Duration,
}

/// Environment values and arguments may be secret, so they are not printed.
impl fmt::Debug for LaunchOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaunchOrder")
            .field("instance", &self.instance)
            .field("launch_id", &self.launch_id)
            .field("program", &self.program)
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

/// What to execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// A path, or a name to be looked up in PATH.
    Named(String),
    /// This very binary: the echo engine lives in it.
    Own,
}

/// Ask an instance how it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeRequest {
    /// What is counted with the answer.
    pub purpose: ProbePurpose,
    /// How it is asked.
    pub method: ProbeMethod,
    /// On 127.0.0.1.
    pub port: Port,
    /// How long the answer may take.
    pub timeout: Duration,
}

/// What an answer counts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbePurpose {
    /// Started or not.
    Startup,
    /// Ready or not.
    Readiness,
    /// Alive or not.
    Liveness,
}

/// How an instance is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeMethod {
    /// GET this path.
    HttpGet {
        /// Beginning with `/`.
        path: String,
    },
    /// Connect.
    TcpConnect,
}
