"""Problems with an answer that can be checked."""
