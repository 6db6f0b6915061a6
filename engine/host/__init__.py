"""The only part of the engine that touches ComfyUI. Written against 0.30; what differs elsewhere is detected, not assumed."""
