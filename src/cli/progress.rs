//! The progress line: one line on a terminal while long work goes on, and nothing anywhere else.

use std::io::{self, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Often enough to look alive.
const TICK: Duration = Duration::from_millis(120);

/// A line that turns while something goes on. Cheap to clone; all clones are the same line.
#[derive(Clone)]
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A line on stderr, hidden unless that is a terminal.
    pub fn new() -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        // The template is fixed, and a line without colours is still a line.
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Shows what is going on.
    pub fn show(&self, text: String) {
        if self.bar.is_hidden() {
            self.bar.reset();
            // Stays hidden where that is not a terminal.
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.enable_steady_tick(TICK);
        self.bar.set_message(text);
    }

    /// Nothing is going on.
    pub fn hide(&self) {
        if !self.bar.is_hidden() {
            self.bar.finish_and_clear();
            self.bar.set_draw_target(ProgressDrawTarget::hidden());
        }
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
