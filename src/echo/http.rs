//! The HTTP side: which path does what.
#![expect(clippy::disallowed_methods, reason = "answers carry the time")]

use std::future::pending;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::json;

use super::engine::{Engine, Health};
use super::log;
use super::openai::{self, ApiError, Endpoint};

/// The engine's paths.
pub(super) fn router(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn(log_request))
        .with_state(engine)
}

/// One line per answered request. One that hangs logs its own line, since it never comes back here.
async fn log_request(request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let response = next.run(request).await;
    log(format_args!(
        "{method} {path} {}",
        response.status().as_u16()
    ));
    response
}

async fn health(State(engine): State<Arc<Engine>>) -> Response {
    let (status, text) = match engine.health() {
        Health::Loading => (StatusCode::SERVICE_UNAVAILABLE, "loading model"),
        Health::Healthy => (StatusCode::OK, "ok"),
        Health::Failing => (StatusCode::INTERNAL_SERVER_ERROR, "failing as told"),
        Health::Hung => {
            log(format_args!("GET /health hangs"));
            pending().await
        }
    };
    (status, Json(json!({"status": text}))).into_response()
}

async fn metrics(State(engine): State<Arc<Engine>>) -> Response {
    // The version is part of the Prometheus text format's media type.
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], engine.metrics()).into_response()
}

async fn models(State(engine): State<Arc<Engine>>) -> Result<Response, ApiError> {
    if !engine.is_loaded() && !engine.args.lie_healthy {
        return Err(loading());
    }
    let document = json!({"object": "list", "data": [
        {"id": engine.name, "object": "model", "created": 0, "owned_by": "evenkeel"},
    ]});
    Ok(Json(document).into_response())
}

async fn completions(
    State(engine): State<Arc<Engine>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    complete(&engine, Endpoint::Completions, body).await
}

async fn chat_completions(
    State(engine): State<Arc<Engine>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    complete(&engine, Endpoint::Chat, body).await
}

async fn complete(
    engine: &Engine,
    endpoint: Endpoint,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let running = engine.begin();
    if !engine.is_loaded() {
        return Err(loading());
    }
    if engine.args.hang_requests {
        log(format_args!("a request hangs"));
        return pending().await;
    }
    if engine.args.fail_requests {
        return Err(ApiError::new(500, "server_error", "failing as told"));
    }
    let body = body.map_err(|rejection| {
        let status = rejection.status().as_u16();
        ApiError::new(status, "invalid_request_error", rejection.body_text())
    })?;
    let request = openai::parse(endpoint, &body)?;
    if let Some(asked) = request
        .model
        .as_ref()
        .filter(|asked| **asked != engine.name)
    {
        let message = format!("model {asked:?} is not served here; {:?} is", engine.name);
        return Err(ApiError::new(404, "not_found_error", message));
    }
    let stream = request.stream;
    // A clock before 1970 is worth no failure: the field is for people.
    let created = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    let reply = request.answer(&engine.name, running.number, created);
    engine.count_tokens(reply.prompt_tokens, reply.generated_tokens());
    if stream {
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        Ok((headers, reply.events()).into_response())
    } else {
        Ok(Json(reply.json()).into_response())
    }
}

async fn unknown_path(request: Request) -> ApiError {
    let message = format!("there is no {}", request.uri().path());
    ApiError::new(404, "not_found_error", message)
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!(
        "{} does not take {}",
        request.uri().path(),
        request.method()
    );
    ApiError::new(405, "invalid_request_error", message)
}

/// What llama-server says while it loads.
fn loading() -> ApiError {
    ApiError::new(503, "unavailable_error", "Loading model")
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).expect("statuses here are HTTP's own");
        (status, Json(self.body())).into_response()
    }
}
