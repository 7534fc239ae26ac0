//! The real llama-server, where there is one.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Finds `llama-server`: `EVENKEEL_LLAMA_SERVER`, else the `PATH`.
///
/// Where there is none that can run, the test that asks is to return, and a line says so on standard error, which the
/// test runner does not hide. With `llama` among the words of `EVENKEEL_TEST_REQUIRE` that fails the test instead.
pub fn llama_server() -> Option<PathBuf> {
    match find() {
        Ok(path) => Some(path),
        Err(reason) => {
            let required = std::env::var("EVENKEEL_TEST_REQUIRE").unwrap_or_default();
            let required = required.split([',', ' ']).any(|word| word == "llama");
            let test = std::thread::current().name().unwrap_or("a test").to_owned();
            assert!(!required, "{test} needs llama-server: {reason}");
            // Not `eprintln!`, which the test runner would hold back.
            writeln!(
                std::io::stderr(),
                "SKIPPED: {test} needs llama-server: {reason}"
            )
            .expect("standard error is open");
            None
        }
    }
}

fn find() -> Result<PathBuf, String> {
    let path = match std::env::var_os("EVENKEEL_LLAMA_SERVER") {
        Some(path) => {
            let path = PathBuf::from(path);
            if !is_program(&path) {
                return Err(format!(
                    "EVENKEEL_LLAMA_SERVER: {} is no program",
                    path.display()
                ));
            }
            path
        }
        None => std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .map(|folder| folder.join("llama-server"))
            .find(|path| is_program(path))
            .ok_or("EVENKEEL_LLAMA_SERVER is not set and there is none on the PATH")?,
    };
    // The build that CI installs dies of SIGILL without it. A build of the user's own may not need it, and then this
    // is too strict, but a test that dies with "illegal instruction" helps nobody.
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if cpu.split_whitespace().any(|flag| flag == "avx512f") {
        Ok(path)
    } else {
        Err("this processor has no AVX-512".to_owned())
    }
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}
