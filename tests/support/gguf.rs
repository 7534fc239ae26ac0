//! Writes a tiny model of random weights that the real llama-server loads.
//!
//! The file is GGUF version 3, architecture `llama`, all weights `f32`. Everything in it comes from the seed, so that the
//! same [`TinyModel`] gives the same bytes.
//!
//! * The tokenizer is of the SPM kind: three control tokens, the 256 byte tokens that such a tokenizer falls back on,
//!   printable ASCII, and some words with all their beginnings, since a merge needs its result in the vocabulary.
//! * Dimension 0 is a *lane* that no layer writes to: each token's embedding is large there, and so is, with a minus, the
//!   output row of each control and byte token. So those are never sampled. What is generated is printable ASCII, and as
//!   the end-of-text token is among them, it has exactly as many tokens as were asked for.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// What to write.
pub struct TinyModel {
    /// Where the weights come from.
    pub seed: u64,
    /// `general.name`.
    pub name: String,
    /// Tokens in the context that the model claims to be trained for.
    pub context_length: u32,
    /// About how large the file is, in megabytes. `None` is 0.6; others begin at 50 or so and load slowly.
    pub target_mb: Option<u32>,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            seed: 1,
            name: "tiny-random-llama".to_owned(),
            context_length: 4096,
            target_mb: None,
        }
    }
}

/// How to spoil a file.
#[derive(Debug, Clone, Copy)]
pub enum Damage {
    /// The first bytes are no longer "GGUF".
    Magic,
    /// The second half is missing, as after a download that broke off.
    Truncated,
    /// Nothing is left.
    Empty,
}

/// Writes the model.
pub fn write_tiny(path: &Path, model: &TinyModel) -> io::Result<()> {
    let vocabulary = Vocabulary::new();
    let shape = Shape::new(model.target_mb, vocabulary.tokens.len());
    let tensors = tensors(&shape, &vocabulary);

    let mut header = Header::default();
    metadata(&mut header, model, &shape, &vocabulary);
    for tensor in &tensors {
        header.tensor(tensor);
    }
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&header.finish())?;
    let mut noise = Noise(model.seed);
    for tensor in &tensors {
        tensor.write(&mut noise, &mut file)?;
        // Every row is a multiple of the alignment, see `Shape`, so that there is nothing to pad.
    }
    file.into_inner()?.sync_all()
}

/// Spoils a file.
pub fn damage(path: &Path, damage: Damage) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    match damage {
        Damage::Magic => file.write_all(b"NOPE"),
        Damage::Truncated => file.set_len(file.metadata()?.len() / 2),
        Damage::Empty => file.set_len(0),
    }
}

const ALIGNMENT: usize = 32;

/// The kinds of tokens, as GGUF numbers them.
mod kind {
    pub const NORMAL: i32 = 1;
    pub const UNKNOWN: i32 = 2;
    pub const CONTROL: i32 = 3;
    pub const BYTE: i32 = 6;
}

struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    scores: Vec<f32>,
}

impl Vocabulary {
    fn new() -> Self {
        const WORDS: &str = "a all and any are as at be by can do for from has have how if in is it keel more my no \
                             not of on one or out over port sail ship so some than that the them then there they \
                             this to up was water what when where which who will wind with you";
        // SPM writes a space as this.
        const SPACE: char = '\u{2581}';

        let mut all = Self {
            tokens: Vec::new(),
            kinds: Vec::new(),
            scores: Vec::new(),
        };
        all.add("<unk>".to_owned(), kind::UNKNOWN);
        all.add("<s>".to_owned(), kind::CONTROL);
        all.add("</s>".to_owned(), kind::CONTROL);
        for byte in 0..=u8::MAX {
            all.add(format!("<0x{byte:02X}>"), kind::BYTE);
        }
        let mut pieces: Vec<String> = Vec::new();
        for word in WORDS.split_whitespace() {
            let letters: Vec<char> = word.chars().collect();
            for length in 1..=letters.len() {
                pieces.push(std::iter::once(&SPACE).chain(&letters[..length]).collect());
            }
        }
        // Longer ones first, since scores go down and the best score is merged first.
        pieces.sort_by_key(|piece| (usize::MAX - piece.len(), piece.clone()));
        pieces.dedup();
        pieces.push(SPACE.to_string());
        pieces.extend(('!'..='~').map(String::from));
        for piece in pieces {
            all.add(piece, kind::NORMAL);
        }
        all
    }

    fn add(&mut self, token: String, kind: i32) {
        let score = match kind {
            kind::NORMAL => self.scores.last().map_or(0.0, |last| last - 1.0),
            _ => 0.0,
        };
        self.tokens.push(token);
        self.kinds.push(kind);
        self.scores.push(score);
    }
}

/// The model's dimensions. All are multiples of 8, so that every row of `f32` fills the alignment.
struct Shape {
    vocabulary: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    hidden: usize,
    layers: usize,
}

impl Shape {
    fn new(target_mb: Option<u32>, vocabulary: usize) -> Self {
        let Some(megabytes) = target_mb else {
            return Self {
                vocabulary,
                width: 64,
                heads: 4,
                kv_heads: 2,
                hidden: 160,
                layers: 2,
            };
        };
        let mut shape = Self {
            vocabulary,
            width: 1024,
            heads: 16,
            kv_heads: 4,
            hidden: 2816,
            layers: 1,
        };
        let size = |shape: &Self| -> usize {
            let all = tensors(shape, &Vocabulary::new());
            all.iter().map(Tensor::size).sum()
        };
        let one = size(&shape);
        shape.layers = 2;
        let layer = size(&shape) - one;
        let wanted = megabytes as usize * 1_000_000;
        shape.layers = 1 + wanted.saturating_sub(one) / layer;
        shape
    }

    fn head(&self) -> usize {
        self.width / self.heads
    }
}

/// One matrix, or a vector as a matrix of one row.
struct Tensor {
    name: String,
    rows: usize,
    columns: usize,
    fill: Fill,
}

enum Fill {
    /// A norm's weights.
    Ones,
    /// Random, of this standard deviation.
    Random(f32),
    /// The same, but with zeros in row 0, so that the result leaves the lane alone.
    RandomBesideLane(f32),
    /// The same as `Random`, with these values in column 0.
    RandomWithLane(f32, Vec<f32>),
}

impl Tensor {
    /// The count of rows after which random ones repeat, so that a large model is quick to write without optimisation.
    const PERIOD: usize = 128;

    fn size(&self) -> usize {
        self.rows * self.columns * size_of::<f32>()
    }

    fn write(&self, noise: &mut Noise, file: &mut impl Write) -> io::Result<()> {
        let mut rows: Vec<Vec<u8>> = Vec::new();
        for index in 0..self.rows {
            // Row 0 may be special, and so may every row with a lane.
            let repeats = !matches!(self.fill, Fill::RandomWithLane(..));
            if repeats && index > Self::PERIOD {
                file.write_all(&rows[1 + (index - 1) % Self::PERIOD])?;
                continue;
            }
            let mut row = Vec::new();
            self.fill.row(index, self.columns, noise, &mut row);
            file.write_all(&row)?;
            rows.push(row);
        }
        Ok(())
    }
}

impl Fill {
    fn row(&self, index: usize, columns: usize, noise: &mut Noise, row: &mut Vec<u8>) {
        let mut random = |deviation: f32| {
            for _ in 0..columns {
                row.extend_from_slice(&(noise.next() * deviation).to_le_bytes());
            }
        };
        match self {
            Self::Ones => row.extend(std::iter::repeat_n(1.0_f32.to_le_bytes(), columns).flatten()),
            Self::RandomBesideLane(_) if index == 0 => {
                row.resize(columns * size_of::<f32>(), 0);
            }
            Self::Random(deviation) | Self::RandomBesideLane(deviation) => random(*deviation),
            Self::RandomWithLane(deviation, lane) => {
                random(*deviation);
                row[..size_of::<f32>()].copy_from_slice(&lane[index].to_le_bytes());
            }
        }
    }
}

fn tensors(shape: &Shape, vocabulary: &Vocabulary) -> Vec<Tensor> {
    #[allow(clippy::cast_precision_loss, reason = "widths are small")]
    let deviation = |inputs: usize| 1.0 / (inputs as f32).sqrt();
    let tensor = |name: String, rows: usize, columns: usize, fill: Fill| Tensor {
        name,
        rows,
        columns,
        fill,
    };
    let (width, hidden) = (shape.width, shape.hidden);
    let kv = shape.kv_heads * shape.head();
    let random = || Fill::Random(deviation(width));

    let never = |kind: &i32| if *kind == kind::NORMAL { 0.0 } else { -60.0 };
    let output_lane = vocabulary.kinds.iter().map(never).collect();
    let embedding = Fill::RandomWithLane(1.0, vec![4.0; shape.vocabulary]);
    let output = Fill::RandomWithLane(2.0 * deviation(width), output_lane);

    let mut all = Vec::new();
    all.push(tensor(
        "token_embd.weight".to_owned(),
        shape.vocabulary,
        width,
        embedding,
    ));
    for layer in 0..shape.layers {
        let named = |part: &str| format!("blk.{layer}.{part}.weight");
        let beside = |inputs| Fill::RandomBesideLane(deviation(inputs));
        all.extend([
            tensor(named("attn_norm"), 1, width, Fill::Ones),
            tensor(named("attn_q"), width, width, random()),
            tensor(named("attn_k"), kv, width, random()),
            tensor(named("attn_v"), kv, width, random()),
            tensor(named("attn_output"), width, width, beside(width)),
            tensor(named("ffn_norm"), 1, width, Fill::Ones),
            tensor(named("ffn_gate"), hidden, width, random()),
            tensor(named("ffn_up"), hidden, width, random()),
            tensor(named("ffn_down"), width, hidden, beside(hidden)),
        ]);
    }
    all.push(tensor(
        "output_norm.weight".to_owned(),
        1,
        width,
        Fill::Ones,
    ));
    all.push(tensor(
        "output.weight".to_owned(),
        shape.vocabulary,
        width,
        output,
    ));
    all
}

fn metadata(header: &mut Header, model: &TinyModel, shape: &Shape, vocabulary: &Vocabulary) {
    const TEMPLATE: &str = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}\
                            {% if add_generation_prompt %}[assistant] {% endif %}";
    let number = |value: usize| Value::U32(value.try_into().expect("dimensions are small"));
    let text = |value: &str| Value::Text(value.to_owned());

    header.value("general.architecture", &text("llama"));
    header.value("general.name", &text(&model.name));
    header.value("general.description", &text("random weights, for tests"));
    header.value("general.file_type", &Value::U32(0)); // all f32
    header.value("llama.context_length", &Value::U32(model.context_length));
    header.value("llama.embedding_length", &number(shape.width));
    header.value("llama.block_count", &number(shape.layers));
    header.value("llama.feed_forward_length", &number(shape.hidden));
    header.value("llama.attention.head_count", &number(shape.heads));
    header.value("llama.attention.head_count_kv", &number(shape.kv_heads));
    header.value(
        "llama.attention.layer_norm_rms_epsilon",
        &Value::F32(0.000_01),
    );
    header.value("llama.rope.dimension_count", &number(shape.head()));
    header.value("llama.rope.freq_base", &Value::F32(10_000.0));
    header.value("llama.vocab_size", &number(shape.vocabulary));

    header.value("tokenizer.ggml.model", &text("llama"));
    header.value("tokenizer.ggml.pre", &text("default"));
    header.value(
        "tokenizer.ggml.tokens",
        &Value::Texts(vocabulary.tokens.clone()),
    );
    header.value(
        "tokenizer.ggml.scores",
        &Value::F32s(vocabulary.scores.clone()),
    );
    header.value(
        "tokenizer.ggml.token_type",
        &Value::I32s(vocabulary.kinds.clone()),
    );
    header.value("tokenizer.ggml.unknown_token_id", &Value::U32(0));
    header.value("tokenizer.ggml.bos_token_id", &Value::U32(1));
    header.value("tokenizer.ggml.eos_token_id", &Value::U32(2));
    header.value("tokenizer.ggml.padding_token_id", &Value::U32(0));
    header.value("tokenizer.ggml.add_bos_token", &Value::Bool(true));
    header.value("tokenizer.ggml.add_eos_token", &Value::Bool(false));
    header.value("tokenizer.ggml.add_space_prefix", &Value::Bool(true));
    header.value("tokenizer.chat_template", &text(TEMPLATE));
}

/// A metadata value, of those types that a model of this kind needs.
enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
}

/// All that precedes the weights, in the two lists that it consists of.
#[derive(Default)]
struct Header {
    values: Vec<u8>,
    value_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data_size: usize,
}

impl Header {
    fn value(&mut self, key: &str, value: &Value) {
        const ARRAY: u32 = 9;
        let out = &mut self.values;
        put_text(out, key);
        match value {
            Value::U32(number) => {
                put_u32(out, 4);
                put_u32(out, *number);
            }
            Value::F32(number) => {
                put_u32(out, 6);
                out.extend(number.to_le_bytes());
            }
            Value::Bool(yes) => {
                put_u32(out, 7);
                out.push(u8::from(*yes));
            }
            Value::Text(text) => {
                put_u32(out, 8);
                put_text(out, text);
            }
            Value::Texts(texts) => {
                put_u32(out, ARRAY);
                put_u32(out, 8);
                put_u64(out, texts.len());
                for text in texts {
                    put_text(out, text);
                }
            }
            Value::F32s(numbers) => {
                put_u32(out, ARRAY);
                put_u32(out, 6);
                put_u64(out, numbers.len());
                out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            }
            Value::I32s(numbers) => {
                put_u32(out, ARRAY);
                put_u32(out, 5);
                put_u64(out, numbers.len());
                out.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            }
        }
        self.value_count += 1;
    }

    fn tensor(&mut self, tensor: &Tensor) {
        let out = &mut self.tensors;
        put_text(out, &tensor.name);
        // The innermost dimension goes first, and a vector has only that one.
        if tensor.rows == 1 {
            put_u32(out, 1);
            put_u64(out, tensor.columns);
        } else {
            put_u32(out, 2);
            put_u64(out, tensor.columns);
            put_u64(out, tensor.rows);
        }
        put_u32(out, 0); // f32
        put_u64(out, self.data_size);
        self.data_size += tensor.size();
        self.tensor_count += 1;
    }

    fn finish(self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        put_u32(&mut out, 3);
        out.extend(self.tensor_count.to_le_bytes());
        out.extend(self.value_count.to_le_bytes());
        out.extend(self.values);
        out.extend(self.tensors);
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }
}

fn put_u32(out: &mut Vec<u8>, number: u32) {
    out.extend(number.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, number: usize) {
    out.extend((number as u64).to_le_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_u64(out, text.len());
    out.extend(text.as_bytes());
}

/// Random numbers of mean 0 and standard deviation 1, evenly spread (splitmix64 underneath).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        // The upper 24 bits, which is what an f32 holds exactly, spread over the square root of 12.
        #[allow(clippy::cast_precision_loss, reason = "24 bits fit")]
        let unit = (mixed >> 40) as f32 / (1_u32 << 24) as f32;
        (unit - 0.5) * 12.0_f32.sqrt()
    }
}
