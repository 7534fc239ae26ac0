//! One HTTP request to 127.0.0.1 per call.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use super::process::PATIENCE;

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }
}

pub fn get(port: u16, path: &str) -> io::Result<Answer> {
    request(port, "GET", path, b"", PATIENCE)
}

pub fn post(port: u16, path: &str, body: impl AsRef<[u8]>) -> io::Result<Answer> {
    request(port, "POST", path, body.as_ref(), PATIENCE)
}

/// Gives up after `patience` without a byte, with an error of kind `WouldBlock`.
pub fn request(
    port: u16,
    method: &str,
    path: &str,
    body: &[u8],
    patience: Duration,
) -> io::Result<Answer> {
    let mut stream = open(port, method, path, body)?;
    stream.set_read_timeout(Some(patience))?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let broken = || io::Error::new(io::ErrorKind::InvalidData, format!("not HTTP: {text:?}"));
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(broken)?;
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    Ok(Answer {
        status: status.ok_or_else(broken)?,
        head: head.to_ascii_lowercase(),
        body: body.to_owned(),
    })
}

/// Sends a request and leaves it open.
pub fn open(port: u16, method: &str, path: &str, body: &[u8]) -> io::Result<TcpStream> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    Ok(stream)
}
