//! The originals of a vocabulary, in the order of their ids.

/// The kind of the originals of a vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OriginalKind {
    /// 64-bit signed integers.
    Integer,
    /// UTF-8 texts.
    Text,
}

/// The column of originals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Originals {
    Integers(Vec<i64>),
    Texts(TextColumn),
}

/// Texts, stored consecutively in one buffer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TextColumn {
    buffer: String,
    /// The end of each text in the buffer.
    ends: Vec<usize>,
}

impl Originals {
    pub(super) fn empty(kind: OriginalKind) -> Self {
        match kind {
            OriginalKind::Integer => Self::Integers(Vec::new()),
            OriginalKind::Text => Self::Texts(TextColumn::default()),
        }
    }

    pub(super) fn kind(&self) -> OriginalKind {
        match self {
            Self::Integers(_) => OriginalKind::Integer,
            Self::Texts(_) => OriginalKind::Text,
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Integers(integers) => integers.len(),
            Self::Texts(texts) => texts.len(),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        match self {
            Self::Integers(integers) => size_of::<i64>() * integers.capacity(),
            Self::Texts(texts) => texts.buffer.capacity() + size_of::<usize>() * texts.ends.capacity(),
        }
    }
}

impl TextColumn {
    pub(super) fn push(&mut self, text: &str) {
        self.buffer.push_str(text);
        self.ends.push(self.buffer.len());
    }

    pub(super) fn get(&self, at: usize) -> Option<&str> {
        let end = *self.ends.get(at)?;
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        Some(&self.buffer[start..end])
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|at| self.get(at))
    }
}
