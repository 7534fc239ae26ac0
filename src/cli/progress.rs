//! The progress line: one line on a terminal while long work goes on, and nothing anywhere else.

use std::io::{self, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A line that turns while something goes on. Cheap to clone; all clones are the same line.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A line on stderr, hidden unless that is a terminal.
    pub fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        // The template is fixed, and a line without colours is still a line.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Shows what is going on.
    pub fn show(&self, text: String) {
        self.bar.enable_steady_tick(Duration::from_millis(120));
        self.bar.set_message(text);
    }

    /// Nothing is going on.
    pub fn hide(&self) {
        self.bar.disable_steady_tick();
        self.bar.reset();
        self.bar.set_message("");
        self.bar.finish_and_clear();
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Log lines go above the progress line.
impl Write for Progress {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bar.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
